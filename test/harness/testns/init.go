package testns

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// initMain is PID 1. It sets up the namespaces, runs the command and reaps orphans.
func initMain(argv []string, strict bool) int {
	if len(argv) == 0 {
		return fail(errors.New("no command"))
	}
	if err := errors.Join(setupMounts(), setupNetwork()); err != nil {
		return fail(err)
	}
	os.Unsetenv(envInit)
	os.Unsetenv(envSource)
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
		fmt.Fprintf(os.Stderr, "testns: killing %d processes that the command left running:\n\t%s\n", len(left), strings.Join(left, "\n\t"))
		if strict && code == 0 {
			code = exitSetup
		}
	}
	return code
}

// reapUntil reaps all children, including adopted ones, until the given process has ended.
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

// leftovers describes the live processes of this PID namespace except PID 1.
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

// alive reports whether the given process has not ended (proc_pid_stat(5): zombies have state Z, dead processes X).
func alive(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	// The name, in parentheses, can contain any character. The state is the first field after the name.
	_, state, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte{' '})
	return err == nil && ok && len(state) > 0 && state[0] != 'Z' && state[0] != 'X'
}

// describe returns the command line of the given process. The command line is empty for a moment during execve, so
// describe retries. Some processes never have a command line. In that case, describe returns the process's name.
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

// setupMounts makes a mount tree that is invisible to the host. Within the tree, mounts propagate as on a host.
func setupMounts() error {
	// A host with cgroup v1 often mounts an empty cgroup2 as well, which crun before 1.9 refuses. Mount a tmpfs in its
	// place, because crun creates directories there anyway.
	const unified = "/sys/fs/cgroup/unified"
	var fs unix.Statfs_t
	hybrid := unix.Statfs(unified, &fs) == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC
	// CNI plugins store leases here by default. Hide the leases of other worlds on the host.
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
		{"unmount the world", detachWorld, os.Getenv(envInit) != nested},
		{"mount " + mountPoint, func() error {
			return unix.Mount(os.Getenv(envSource), mountPoint, "", unix.MS_BIND, "")
		}, os.Getenv(envInit) == nested},
		{"mount /dev/null", ownNull, os.Getenv(envInit) == nested},
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

// ownNull gives the world a /dev/null of its own, so that a fault under test harms no other program on this machine. Its owner
// is no user of the host or of a test: a test sees every change of it.
func ownNull() error {
	node := filepath.Join(mountPoint, "null")
	if err := unix.Mknod(node, unix.S_IFCHR, int(unix.Mkdev(1, 3))); err != nil {
		return err
	}
	// Mknod applies the umask, Chmod does not.
	return errors.Join(os.Chmod(node, 0o666), os.Chown(node, 12, 34), unix.Mount(node, "/dev/null", "", unix.MS_BIND, ""))
}

// setupNetwork brings up lo and enables forwarding, as on a node.
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
