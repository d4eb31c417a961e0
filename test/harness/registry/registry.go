// Package registry runs Debian's docker-registry on loopback with a storage directory. It knows nothing about tests or
// images.
package registry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Server is a running docker-registry.
type Server struct {
	// Addr is HOST:PORT for plain HTTP.
	Addr string
	cmd  *exec.Cmd
	done chan error
}

// configuration is the configuration of docker-registry. Deletion is enabled, because tests of garbage collection need
// it.
const configuration = `version: 0.1
log: {level: warn, formatter: text, accesslog: {disabled: true}}
storage:
  filesystem: {rootdirectory: %q}
  delete: {enabled: true}
  maintenance: {uploadpurging: {enabled: false}}
http: {addr: %q}
`

// Start serves the storage directory on addr and returns when the registry answers. Port 0 selects a free port. The
// configuration and the log are beside the directory, as DIR.yml and DIR.log.
// Further settings, such as "auth:", are in YAML.
func Start(ctx context.Context, dir, addr string, settings ...string) (*Server, error) {
	addr, err := resolve(addr)
	if err != nil {
		return nil, err
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	config := dir + ".yml"
	if err := os.WriteFile(config, []byte(fmt.Sprintf(configuration, dir, addr)+strings.Join(settings, "\n")), 0o644); err != nil {
		return nil, err
	}
	log, err := os.Create(dir + ".log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	s := &Server{Addr: addr, cmd: exec.Command("docker-registry", "serve", config), done: make(chan error, 1)}
	s.cmd.Stdout, s.cmd.Stderr = log, log
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w (hack/setup.sh installs it)", err)
	}
	go func() { s.done <- s.cmd.Wait() }()
	if err := s.waitReady(ctx); err != nil {
		text, _ := os.ReadFile(log.Name())
		return nil, errors.Join(fmt.Errorf("docker-registry on %s: %w\n%s", addr, err, text), s.Stop())
	}
	return s, nil
}

func resolve(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || port != "0" {
		return addr, err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// waitReady polls the API until it answers. docker-registry gives no other sign that it is ready.
func (s *Server) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.Addr+"/v2/", nil)
		if err != nil {
			return err
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
			return nil
		}
		select {
		case err := <-s.done:
			s.done <- err
			return fmt.Errorf("ended: %w", err)
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// Wait waits until the server has ended.
func (s *Server) Wait() error {
	err := <-s.done
	s.done <- err
	return err
}

// Stop stops the server. It is idempotent.
func (s *Server) Stop() error {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	_ = s.Wait() // the error only says that the signal ended it
	return nil
}

// WriteHosts writes DIR/_default/hosts.toml (containerd's registry host configuration), which redirects the pulls from
// every registry to addr over plain HTTP.
func WriteHosts(dir, addr string) error {
	text := fmt.Sprintf("server = %[1]q\n\n[host.%[1]q]\n  capabilities = [\"pull\", \"resolve\"]\n", "http://"+addr)
	if err := os.MkdirAll(filepath.Join(dir, "_default"), 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "_default", "hosts.toml"), []byte(text), 0o644)
}
