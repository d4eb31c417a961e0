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

// Open clones the tree of mounts at path into one that is nowhere, and opens it: it is read-only for whoever has it when it
// shall be, whatever he tries, and vanishes with its descriptor. Where the file system can, root's files are in it those of
// user uid and group gid, and the other way round: then that user, as whom the guest's root acts, reads what is root's, as a
// container's root would, and what he writes is root's. Users other than root are what they are. mapped tells whether that is
// so; elsewhere (NFS, FUSE, old kernels) owners are what they are.
func Open(path string, readOnly bool, uid, gid int) (tree *os.File, mapped bool, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, false, err
	}
	if !info.IsDir() {
		return nil, false, fmt.Errorf("%s is no directory; only directories can be shared", path)
	}
	tree, err = clone(path, readOnly, uid, gid)
	mapped = err == nil
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) {
		tree, err = clone(path, readOnly, 0, 0)
	}
	if err != nil {
		return nil, false, fmt.Errorf("share %s: %w", path, err)
	}
	return tree, mapped, nil
}

// clone clones with the mapping of owners, unless uid is 0.
func clone(path string, readOnly bool, uid, gid int) (*os.File, error) {
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
