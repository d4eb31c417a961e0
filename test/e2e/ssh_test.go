package e2e

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness"
)

// TestPortForwardStdio: with --stdio, port-forward is one connection, which can be closed in one direction.
func TestPortForwardStdio(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	p := startPod(t, d)
	c := p.Run(harness.ContainerConfig("echo", harness.Busybox, harness.Shell("while :; do nc -l -p 7 -e sh -c 'cat; echo end'; done")))
	c.Must("sh", "-c", "until netstat -ltn | grep -q :7; do usleep 20000; done")
	sent := make([]byte, 3<<20)
	if _, err := rand.Read(sent); err != nil {
		t.Fatal(err)
	}
	forward := tripod(t, d, "port-forward", p.ID, "7", "--stdio")
	forward.Stdin = bytes.NewReader(sent)
	if got, err := forward.Output(); err != nil || !bytes.Equal(got, append(sent, "end\n"...)) {
		t.Errorf("echo: got %d bytes, error %v; want the %d bytes and what follows after their end", len(got), err, len(sent))
	}
	t.Run("the pod closes first", func(t *testing.T) {
		c.Must("sh", "-c", "nc -l -p 8 -e echo hello >/dev/null 2>&1 & until netstat -ltn | grep -q :8; do usleep 20000; done")
		forward := tripod(t, d, "port-forward", p.ID, "8", "--stdio")
		input, err := forward.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer input.Close()
		if got, err := forward.Output(); err != nil || string(got) != "hello\n" {
			t.Errorf("with open input: got %q, error %v; want hello", got, err)
		}
	})
	t.Run("the connection breaks", func(t *testing.T) {
		forward := tripod(t, d, "port-forward", p.ID, "7", "--stdio")
		var stderr bytes.Buffer
		forward.Stderr = &stderr
		input, err := forward.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer input.Close()
		output, err := forward.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := forward.Start(); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(input, "hello")
		if _, err := io.ReadFull(output, make([]byte, len("hello\n"))); err != nil {
			t.Error(err)
		}
		if err := unix.Kill(d.Carrier(), unix.SIGKILL); err != nil {
			t.Error(err)
		}
		if code := exitCode(forward.Wait()); code != 1 || !strings.Contains(stderr.String(), "lost the connection") {
			t.Errorf("after the carrier's death: got exit code %d and %q, want 1", code, stderr.String())
		}
	})
	for name, args := range map[string][]string{
		"connection refused": {p.ID, "9"}, "is not a port": {p.ID, "70000"}, "one port": {p.ID, "7", "8"}, "no pod": {"nobody", "7"},
	} {
		out, err := tripod(t, d, append([]string{"port-forward", "--stdio"}, args...)...).CombinedOutput()
		if code := exitCode(err); code != 1 || !strings.Contains(string(out), name) {
			t.Errorf("port-forward %q: got exit code %d and %q, want 1 and %q", args, code, out, name)
		}
	}
}

// TestSSH: the program ssh reaches a server in a pod, with the pod's host key, our input and the command's exit code.
func TestSSH(t *testing.T) {
	program, err := exec.LookPath("ssh")
	if err != nil {
		t.Fatal(err)
	}
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	pod := func() *harness.Pod {
		p := startPod(t, d, harness.HostNetwork())
		p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("exec sleep 3600")))
		return p
	}
	key, signer := newKey(t)
	home := t.TempDir()
	config := filepath.Join(home, "config")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	write(config, "")
	write(filepath.Join(home, "ssh"), fmt.Sprintf("#!/bin/sh\nexec %s -F %s \"$@\"\n", program, config)) // ssh itself does not look at $HOME
	run := func(p *harness.Pod, flags ...string) (string, error) {
		c := tripod(t, d, append([]string{"ssh", p.ID, "-l", "me", "-i", key}, flags...)...)
		c.Args = append(c.Args, "--", "the", "command")
		c.Env = append(os.Environ(), "HOME="+home, "XDG_CACHE_HOME=", "PATH="+home+":"+os.Getenv("PATH"))
		c.Stdin = strings.NewReader("input")
		out, err := c.CombinedOutput()
		return string(out), err
	}
	p := pod()
	port, stop := serveSSH(t, signer.PublicKey(), "0")
	for range 2 {
		if out, err := run(p, "-p", port); exitCode(err) != 5 || !strings.HasSuffix(out, "me ran the command with input") {
			t.Errorf("ssh: got exit code %d and %q, want 5 and the command's output", exitCode(err), out)
		}
	}
	second, _ := serveSSH(t, signer.PublicKey(), "0")
	if out, err := run(p, "-p", second); exitCode(err) != 5 {
		t.Errorf("another server in the pod: got exit code %d and %q, want 5", exitCode(err), out)
	}
	stop()
	serveSSH(t, signer.PublicKey(), port)
	write(config, "Port "+port+"\n")
	if out, err := run(p, "-p", second); exitCode(err) != 5 {
		t.Errorf("another port than the configuration's: got exit code %d and %q, want 5", exitCode(err), out)
	}
	if out, err := run(p); exitCode(err) != 255 || !strings.Contains(out, "REMOTE HOST IDENTIFICATION HAS CHANGED") {
		t.Errorf("another host key: got exit code %d and %q, want that ssh refuses it", exitCode(err), out)
	}
	if out, err := run(pod()); exitCode(err) != 5 {
		t.Errorf("another host key of another pod: got exit code %d and %q, want 5", exitCode(err), out)
	}
	if out, err := run(p, "-p", "1"); exitCode(err) != 255 || !strings.Contains(out, "connection refused") {
		t.Errorf("without a server: got exit code %d and %q, want 255 and the reason", exitCode(err), out)
	}
	p.Stop()
	if out, err := run(p); exitCode(err) != 1 || !strings.Contains(out, "is not running") {
		t.Errorf("a stopped pod: got exit code %d and %q", exitCode(err), out)
	}
}

func exitCode(err error) int {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return 0
}

// newKey returns a private key and the file that holds it.
func newKey(t *testing.T) (string, ssh.Signer) {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return file, signer
}

// serveSSH starts an SSH server at a port of loopback with a new host key, for the owner of a key. Each command prints who ran it
// with which input, and exits with 5.
func serveSSH(t *testing.T, owner ssh.PublicKey, at string) (port string, stop func()) {
	t.Helper()
	_, host := newKey(t)
	config := &ssh.ServerConfig{PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
		if !bytes.Equal(key.Marshal(), owner.Marshal()) {
			return nil, fmt.Errorf("not the owner's key")
		}
		return nil, nil
	}}
	config.AddHostKey(host)
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", at))
	if err != nil {
		t.Fatal(err)
	}
	stop = func() { l.Close() }
	t.Cleanup(stop)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go serveCommands(conn, config)
		}
	}()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port), stop
}

func serveCommands(conn net.Conn, config *ssh.ServerConfig) {
	defer conn.Close()
	server, channels, requests, err := ssh.NewServerConn(conn, config)
	if err != nil {
		return
	}
	go ssh.DiscardRequests(requests)
	for open := range channels {
		channel, requests, err := open.Accept()
		if err != nil {
			return
		}
		for r := range requests {
			_ = r.Reply(r.Type == "exec", nil)
			if r.Type != "exec" {
				continue
			}
			input, _ := io.ReadAll(channel)
			fmt.Fprintf(channel, "%s ran %s with %s", server.User(), r.Payload[4:], input)
			_, _ = channel.SendRequest("exit-status", false, ssh.Marshal(struct{ Code uint32 }{5}))
			channel.Close()
		}
	}
}
