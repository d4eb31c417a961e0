package console

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Each machine's serial log is on its own tmpfs. QEMU appends to the log even if the daemon does not read it. On a
// disk, the file could grow without limit while the daemon is down or the container's log cannot be written. The size
// of the tmpfs is limited by vm.console_buffer, its pages are charged to the pod's cgroup, and it exists until the
// container is removed.

// MakeDir mounts the tmpfs for a serial log of at most size bytes. It replaces the tmpfs of an unfinished earlier attempt.
func MakeDir(dir string, size uint64) error {
	if err := RemoveDir(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return sandbox.DiskError(fmt.Errorf("make the directory of the serial log: %w", err))
	}
	options := fmt.Sprintf("mode=0700,nr_inodes=8,size=%d", size)
	if err := unix.Mount("tripod-console", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		return sandbox.DiskError(fmt.Errorf("mount the tmpfs of the serial log at %s: %w", dir, err))
	}
	return nil
}

// RemoveDir unmounts the tmpfs, if it is mounted, and removes the directory.
func RemoveDir(dir string) error {
	for {
		err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return os.RemoveAll(dir)
		}
		if err != nil {
			return fmt.Errorf("unmount the tmpfs of the serial log at %s: %w", dir, err)
		}
	}
}
