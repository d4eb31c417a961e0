package qemu

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

// openShare clones the tree of mounts at path into one that is nowhere, and opens it: it is read-only for QEMU when it
// shall be, whatever QEMU tries, and vanishes with its descriptor. Where the file system can, root's files are in it
// those of QEMU's user, and the other way round: then the guest's root reads what is root's, as a container's would, and
// what it writes is root's. Users other than root are what they are. Elsewhere (NFS, FUSE, old kernels) the guest may do
// what the permissions of the files allow QEMU's user.
func openShare(path string, readOnly bool, uid, gid int) (*os.File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%s is no directory; only directories can be shared", path)
	}
	f, err := cloneShare(path, readOnly, uid, gid)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) {
		f, err = cloneShare(path, readOnly, 0, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("share %s: %w", path, err)
	}
	return f, nil
}

// cloneShare clones with the mapping of owners, unless uid is 0.
func cloneShare(path string, readOnly bool, uid, gid int) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return nil, fmt.Errorf("open_tree: %w", err)
	}
	tree := os.NewFile(uintptr(fd), path)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID, Propagation: unix.MS_PRIVATE}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if uid != 0 {
		owners, err := mapping(uid, gid)
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

// makingUserns: one at a time, each starts a process.
var makingUserns sync.Mutex

// mapping makes a user namespace that swaps root with a user and a group.
func mapping(uid, gid int) (*os.File, error) {
	makingUserns.Lock()
	defer makingUserns.Unlock()
	return mount.GetUsernsFD(swap(uid), swap(gid))
}

// swap writes the mapping on disk:mounted:count that exchanges 0 and id and leaves all others.
func swap(id int) string {
	const all = 1<<32 - 2
	n := strconv.Itoa
	parts := []string{"0:" + n(id) + ":1", n(id) + ":0:1"}
	if id > 1 {
		parts = append(parts, "1:1:"+n(id-1))
	}
	return strings.Join(append(parts, n(id+1)+":"+n(id+1)+":"+n(all-id)), ",")
}
