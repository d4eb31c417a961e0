package launch

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// OpenMount opens a directory as a detached mount; resolve has flags of openat2(2). ".." does not lead out of the mount, the kernel
// enforces read-only access, and device files do not work. The mount disappears when its last descriptor is closed.
func OpenMount(host string, readonly bool, resolve uint64) (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, host, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: resolve})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	mount, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|unix.AT_RECURSIVE)
	if err != nil {
		return nil, fmt.Errorf("clone the mount: %w", err)
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE}
	if readonly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		unix.Close(mount)
		return nil, fmt.Errorf("set the mount's attributes: %w", err)
	}
	return os.NewFile(uintptr(mount), host), nil
}
