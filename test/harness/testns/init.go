package testns

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// initMain is PID 1: it makes the inside of the world, runs the command and reaps whatever is orphaned.
func initMain(argv []string, strict bool) int {
	if len(argv) == 0 {
		return fail(errors.New("no command"))
	}
	if err := errors.Join(setupMounts(), setupNetwork()); err != nil {
		return fail(err)
	}
	os.Unsetenv(envInit)
	path, err := exec.LookPath(argv[0])
	if err != nil {
		fmt.Fprintf(os.Stderr, "testns: %v\n", err)
		return 127
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, forwarded...)
	p, err := os.StartProcess(path, argv, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return fail(err)
	}
	go func() {
		for s := range signals {
			_ = unix.Kill(p.Pid, s.(syscall.Signal))
		}
	}()
	code := exitCode(reapUntil(p.Pid))
	if left := leftovers(); len(left) > 0 {
		fmt.Fprintf(os.Stderr, "testns: %d processes were left running and are ended now:\n\t%s\n", len(left), strings.Join(left, "\n\t"))
		if strict && code == 0 {
			code = exitSetup
		}
	}
	return code
}

// reapUntil reaps every child, adopted ones too, until pid has ended.
func reapUntil(pid int) syscall.WaitStatus {
	for {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(-1, &ws, 0, nil)
		if err == nil && got == pid {
			return ws
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return syscall.WaitStatus(exitSetup << 8)
		}
	}
}

// leftovers describes the processes of this PID namespace but PID 1 and the dead.
func leftovers() []string {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return []string{err.Error()}
	}
	var left []string
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == 1 || !alive(e.Name()) {
			continue
		}
		left = append(left, fmt.Sprintf("%d %s", pid, describe(e.Name())))
	}
	return left
}

// alive reports whether /proc/pid is a process that has not ended (proc_pid_stat(5): zombies are Z, the dead X).
func alive(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	// The name, in brackets, may hold anything; the state is the first field after it.
	_, state, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte{' '})
	return err == nil && ok && len(state) > 0 && state[0] != 'Z' && state[0] != 'X'
}

// describe tells what /proc/pid runs. In the middle of an execve a process has no command line for a moment, and some
// never have one: these are called by their name.
func describe(pid string) string {
	for range 100 {
		if cmd, err := os.ReadFile("/proc/" + pid + "/cmdline"); err != nil || len(cmd) > 0 {
			return string(bytes.ReplaceAll(bytes.TrimRight(cmd, "\x00"), []byte{0}, []byte{' '}))
		}
		time.Sleep(time.Millisecond)
	}
	comm, _ := os.ReadFile("/proc/" + pid + "/comm")
	return string(bytes.TrimSpace(comm))
}

// setupMounts makes a mount tree that the host does not see, and that propagates within itself as on a host.
func setupMounts() error {
	// A host with cgroup v1 often mounts an empty cgroup2 beside it; crun before 1.9 refuses such a host. In its
	// place comes memory of our own: crun makes directories there all the same, and forgets them.
	const unified = "/sys/fs/cgroup/unified"
	var fs unix.Statfs_t
	hybrid := unix.Statfs(unified, &fs) == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC
	// Where CNI plugins keep their leases by default; those of another world that runs beside this one are not ours.
	const leases = "/var/lib/cni"
	_, noLeases := os.Stat(leases)
	steps := []struct {
		what string
		do   func() error
		skip bool
	}{
		{"make / private", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") }, false},
		{"mount /proc", func() error {
			return unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		}, false},
		{"mount /run", func() error {
			return unix.Mount("tripod-test", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755")
		}, false},
		{"mount " + leases, func() error {
			return unix.Mount("tripod-test", leases, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755")
		}, noLeases != nil},
		{"unmount " + unified, func() error { return unix.Unmount(unified, 0) }, !hybrid},
		{"mount " + unified, func() error {
			return unix.Mount("tripod-test", unified, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755")
		}, !hybrid},
		{"make / shared", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "") }, false},
	}
	for _, s := range steps {
		if s.skip {
			continue
		}
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return nil
}

// setupNetwork brings loopback up and lets the namespace route, as a node does.
func setupNetwork() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	for _, key := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		err := os.WriteFile("/proc/sys/net/"+key, []byte("1"), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // a kernel without IPv6
			return err
		}
	}
	return nil
}
