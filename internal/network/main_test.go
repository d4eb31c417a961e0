package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
)

// inHost marks the process that runs the tests: inside namespaces of its own, which play the host.
const inHost = "TRIPOD_NETWORK_TEST_HOST"

// TestMain runs the tests in a fresh network and mount namespace: bridges, NAT rules and mounts that they make
// are never the real host's, and are gone with the process.
func TestMain(m *testing.M) {
	if os.Getenv(inHost) == "" {
		os.Exit(rerun())
	}
	if config := os.Getenv(asDaemon); config != "" {
		os.Exit(daemon(config))
	}
	if err := prepareHost(); err != nil {
		fmt.Fprintln(os.Stderr, "prepare the test host:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// asDaemon makes the test program a daemon that sets up and tears down one pod, by the Config in the variable.
const asDaemon = "TRIPOD_NETWORK_TEST_DAEMON"

// runDaemon starts a daemon on the test host with the node's directories and the given fail points.
func runDaemon(t *testing.T, n *node, failpoints string) *exec.Cmd {
	t.Helper()
	data, err := json.Marshal(struct {
		Config
		IsBackendLink, Logger *struct{} // in place of those of Config, which JSON cannot carry
	}{Config: n.cfg})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), asDaemon+"="+string(data), failpoint.Variable+"="+failpoints)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

func daemon(config string) int {
	var cfg Config
	err := json.Unmarshal([]byte(config), &cfg)
	cfg.Logger = slog.New(slog.DiscardHandler)
	if err == nil {
		var m *Manager
		if m, err = New(cfg); err == nil {
			_, err = m.Setup(context.Background(), Attachment{ID: "pod"})
			err = errors.Join(err, m.Teardown(context.Background(), Attachment{ID: "pod"}))
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func rerun() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inHost+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	default:
		fmt.Fprintln(os.Stderr, "the tests need root, for namespaces of their own:", err)
		return 1
	}
}

// prepareHost cuts the mounts off from the real host, and sets lo up. /proc/sys/net follows the network namespace
// by itself; /run is hidden for iptables' lock.
func prepareHost() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	return netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo", Index: loopbackIndex}})
}

// mountsBelow lists the mounts below dir.
func mountsBelow(t testing.TB, dir string) []string {
	t.Helper()
	data, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); strings.HasPrefix(fields[4], dir+"/") {
			found = append(found, fields[4])
		}
	}
	return found
}
