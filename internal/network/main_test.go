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
	"github.com/tripod-run/tripod/test/races"
)

// inHost is set in the process that runs the tests, in its own namespaces, which stand in for the host.
const inHost = "TRIPOD_NETWORK_TEST_HOST"

// TestMain runs the tests in a new network and mount namespace. So their bridges, NAT rules and mounts never touch the
// real host, and vanish with the process.
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
	os.Exit(races.Run(m.Run))
}

// asDaemon is an environment variable that holds a Config. It turns the test program into a daemon that sets up and
// tears down pods.
const asDaemon = "TRIPOD_NETWORK_TEST_DAEMON"

// runDaemon starts a daemon on the test host with the node's directories and the given fail points.
func runDaemon(t *testing.T, n *node, failpoints string) *exec.Cmd {
	t.Helper()
	data, err := json.Marshal(struct {
		Config
		IsBackendLink, Logger *struct{} // hide the fields of Config that JSON cannot encode
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
			err = errors.Join(err, releaseTwo(m))
			for range 2 { // the second Teardown waits for the background work of the first
				err = errors.Join(err, m.Teardown(context.Background(), Attachment{ID: "pod"}))
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// releaseTwo sets up two pods and releases their networks in one batch.
func releaseTwo(m *Manager) (err error) {
	m.backlog.working = true // so that the first release waits for the second
	for _, id := range []string{"first", "second"} {
		_, failed := m.Setup(context.Background(), Attachment{ID: id})
		err = errors.Join(err, failed, m.Teardown(context.Background(), Attachment{ID: id}))
	}
	m.workOffBacklog()
	return err
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
		fmt.Fprintln(os.Stderr, "the tests need root to make namespaces:", err)
		return 1
	}
}

// prepareHost separates the mounts from the real host's and sets lo up. /run is hidden because of iptables' lock.
// /proc/sys/net follows the network namespace by itself.
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
