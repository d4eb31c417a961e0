package mnt

import (
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// OnNewThread runs fn on a new thread. The thread then ends, because fn leaves it in other namespaces.
func OnNewThread(fn func() error) error {
	run, wait := guard.Part(fn)
	go process.OnOwnThread(run)
	return wait()
}

// Unmount removes all mounts on a path. It detaches mounts that are busy. It succeeds if the path has no mount or is
// missing.
func Unmount(target string) error {
	for {
		err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			err = unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		switch {
		case err == nil:
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			return nil
		default:
			return fmt.Errorf("unmount %s: %w", target, err)
		}
	}
}

// Tmpfs mounts a new tmpfs on a directory and replaces any existing mount.
func Tmpfs(dir, options string) error {
	if err := Unmount(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
	}
	return nil
}

// IsMounted reports whether dir is a mount point.
func IsMounted(dir string) bool {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	return err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// RemovePoint unmounts and removes a directory or a pin. It never deletes files inside a mount, because the
// removal fails if a mount is left. It succeeds if the path does not exist.
func RemovePoint(path string) error {
	if err := Unmount(path); err != nil {
		return err
	}
	return ledger.RemoveFile(path)
}

// Mount mounts a snapshot on a directory unless it is a mount point already.
func Mount(mounts []mount.Mount, dir string) error {
	if IsMounted(dir) {
		return nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := mount.All(mounts, dir); err != nil {
		_ = Unmount(dir)
		return fmt.Errorf("mount on %s: %w", dir, err)
	}
	return nil
}
