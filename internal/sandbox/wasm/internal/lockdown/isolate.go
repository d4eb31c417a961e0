package lockdown

import (
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Isolate gives the process a root directory that contains only /proc, and unmounts everything else. It needs
// CAP_SYS_ADMIN. It returns errdefs.ErrFailedPrecondition if the process shares its mount namespace with its parent, because all
// processes in that namespace would lose their files.
func Isolate() error {
	if err := ownMountNamespace(); err != nil {
		return err
	}
	// The new root is mounted over /proc, because that directory always exists. The mount hides the old /proc only
	// until the root is changed.
	const root = "/proc"
	steps := []struct {
		what string
		do   func() error
	}{
		{"make mounts private", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") }},
		{"mount an empty root", func() error {
			return unix.Mount("tripod-wasm", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC,
				fmt.Sprintf("mode=0755,size=64k,nr_inodes=16,uid=%d,gid=%d", os.Getuid(), os.Getgid()))
		}},
		{"make /proc", func() error { return os.Mkdir(root+"/proc", 0o555) }},
		{"mount /proc", func() error { return mountProc(root + "/proc") }},
		{"enter the root", func() error { return os.Chdir(root) }},
		{"change the root", func() error { return unix.PivotRoot(".", ".") }}, // mounts the old root over the new one
		{"drop the old root", func() error { return unix.Unmount(".", unix.MNT_DETACH) }},
		{"enter the root", func() error { return os.Chdir("/") }},
		{"make the root read-only", func() error {
			return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		}},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("isolate: %s: %w", s.what, err)
		}
	}
	return nil
}

// ownMountNamespace returns an error if the process shares its mount namespace with its parent.
func ownMountNamespace() error {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return fmt.Errorf("isolate: %w", err)
	}
	parent, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", os.Getppid()))
	if errors.Is(err, os.ErrNotExist) {
		return nil // the parent has ended or is outside of this PID namespace
	}
	if err != nil {
		return fmt.Errorf("isolate: %w", err)
	}
	if own == parent {
		return fmt.Errorf("isolate: the mount namespace is shared with the parent: %w", errdefs.ErrFailedPrecondition)
	}
	return nil
}

// mountProc mounts /proc, because the worker reaches preopened directories through /proc/self/fd. The second attempt is
// for kernels before 5.8, which do not support subset=pid.
func mountProc(path string) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("proc", path, "proc", flags, "hidepid=2,subset=pid"); err == nil {
		return nil
	}
	return unix.Mount("proc", path, "proc", flags, "")
}
