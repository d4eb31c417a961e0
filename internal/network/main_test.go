package network

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// inHost marks the process that runs the tests: inside namespaces of its own, which play the host.
const inHost = "TRIPOD_NETWORK_TEST_HOST"

// TestMain runs the tests in a fresh network and mount namespace: bridges, NAT rules and mounts that they make
// are never the real host's, and are gone with the process.
func TestMain(m *testing.M) {
	if os.Getenv(inHost) == "" {
		os.Exit(rerun())
	}
	if err := prepareHost(); err != nil {
		fmt.Fprintln(os.Stderr, "prepare the test host:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
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
