package virtiofsd

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
)

// Open opens a detached clone of the mount tree at path. The clone disappears when its descriptor is closed. If
// readOnly is set, nobody can write through the clone.
//
// Where the file system supports it, files of root appear in the clone as files of the given user and group, and the
// reverse; the second result is then true. All other owners are unchanged. The guest's root acts as the given user.
// Through the clone, the guest's root can read the files of the node's root, as root in a container could, and files
// that the guest's root creates belong to the node's root. Where the file system does not support the swap (NFS, FUSE,
// old kernels), all owners are unchanged.
func Open(path string, readOnly bool, uid, gid int) (tree *os.File, mapped bool, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, false, err
	}
	if !info.IsDir() {
		return nil, false, fmt.Errorf("%s is not a directory; only directories can be shared", path)
	}
	tree, err = clone(path, readOnly, false, uid, gid)
	mapped = err == nil
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) {
		tree, err = clone(path, readOnly, false, 0, 0)
	}
	if err != nil {
		return nil, false, fmt.Errorf("share %s: %w", path, err)
	}
	return tree, mapped, nil
}

// OpenLive is like Open, but what is later mounted below the path appears in the clone, and what is unmounted there
// disappears. The mount at the path must be a shared one. Owners are not mapped, because the mounts to come may be on file
// systems that cannot.
func OpenLive(path string, readOnly bool) (*os.File, error) {
	tree, err := clone(path, readOnly, true, 0, 0)
	if err != nil {
		return nil, fmt.Errorf("share %s: %w", path, err)
	}
	return tree, nil
}

// clone clones the tree. If live is set, mounts propagate from the tree to the clone. Unless uid is 0, the clone swaps
// owners as the comment on Open describes.
func clone(path string, readOnly, live bool, uid, gid int) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return nil, fmt.Errorf("open_tree: %w", err)
	}
	tree := os.NewFile(uintptr(fd), path)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID, Propagation: unix.MS_PRIVATE}
	if live {
		attr.Propagation = unix.MS_SLAVE
	}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if uid != 0 {
		owners, err := swapUserns(uid, gid)
		if err != nil {
			tree.Close()
			return nil, err
		}
		defer owners.Close()
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(owners.Fd())
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr)
	runtime.KeepAlive(tree)
	if err != nil {
		tree.Close()
		return nil, fmt.Errorf("mount_setattr: %w", err)
	}
	return tree, nil
}

// usernsMu serializes the creation of user namespaces, so that only one of the processes that create them runs at a
// time.
var usernsMu sync.Mutex

// swapUserns returns a user namespace whose ID mappings swap root with the given user and group.
func swapUserns(uid, gid int) (*os.File, error) {
	usernsMu.Lock()
	defer usernsMu.Unlock()
	return mount.GetUsernsFD(swapMap(uid), swapMap(gid))
}

// swapMap returns the mapping that swaps 0 with the given ID and leaves all other IDs unchanged. Each entry has the
// form on-disk:mounted:count.
func swapMap(id int) string {
	const all = 1<<32 - 2
	n := strconv.Itoa
	parts := []string{"0:" + n(id) + ":1", n(id) + ":0:1"}
	if id > 1 {
		parts = append(parts, "1:1:"+n(id-1))
	}
	return strings.Join(append(parts, n(id+1)+":"+n(id+1)+":"+n(all-id)), ",")
}
