package tap_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/races"
)

// inHost is set in the process that runs the tests. Its own namespaces act as the host.
const inHost = "TRIPOD_TAP_TEST_HOST"

// TestMain runs the tests in new network and mount namespaces, which disappear with the process.
func TestMain(m *testing.M) {
	if os.Getenv(inHost) == "" {
		os.Exit(rerun())
	}
	if args := os.Getenv(asDaemon); args != "" {
		os.Exit(daemon(args))
	}
	if err := prepareHost(); err != nil {
		fmt.Fprintln(os.Stderr, "prepare the test host:", err)
		os.Exit(1)
	}
	os.Exit(races.Run(m.Run))
}

func rerun() int {
	if !testns.Inside() { // build the guest's image while there is a network
		build := exec.Command("../../../../../hack/images.sh", "build")
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			fmt.Fprintln(os.Stderr, "build the guest's image:", err)
			return 1
		}
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inHost+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "the tests need root to create namespaces:", err)
		return 1
	}
	return 0
}

// prepareHost detaches the mounts from the real host and sets lo up. It hides /run, where iptables has its lock.
func prepareHost() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}
