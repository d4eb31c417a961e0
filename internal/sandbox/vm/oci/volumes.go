package oci

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// makeScratchBase makes the image below all scratch disks, an empty file system, unless it exists. It returns its path. The
// error is errdefs.ErrNotFound if mke2fs is missing. A guest would need most of a second for it. The disks live no longer
// than their machines, so the file system has no journal.
func makeScratchBase(ctx context.Context, root string) (string, error) {
	path := filepath.Join(root, "scratch.ext4")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	program, err := exec.LookPath("mke2fs")
	if err != nil {
		return "", fmt.Errorf("mke2fs is missing (Debian: e2fsprogs): %w: %w", err, errdefs.ErrNotFound)
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", sandbox.DiskError(err)
	}
	temporary := path + ".new"
	file, err := os.OpenFile(temporary, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return "", sandbox.DiskError(err)
	}
	if err := errors.Join(file.Truncate(scratchSize), file.Close()); err != nil {
		return "", sandbox.DiskError(err)
	}
	out, err := exec.CommandContext(ctx, program, "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", "-m",
		"0", temporary).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("make the file system of scratch disks: %w: %s", err, bytes.TrimSpace(out))
	}
	return path, sandbox.DiskError(os.Rename(temporary, path))
}

// makeShared makes the directory of a pod's share: a shared mount, from which the volumes propagate to virtiofsd.
func (o *Backend) makeShared(pod string) error {
	dir := o.sharedDir(pod)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return sandbox.DiskError(err)
	}
	on, err := isMountPoint(dir)
	if err != nil {
		return err
	}
	if on {
		info, err := mount.Lookup(dir)
		if err != nil || strings.Contains(info.Optional, "shared:") {
			return err
		}
	} else if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return os.NewSyscallError("mount", err)
	}
	for _, propagation := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} { // out of the parent's peer group, into one of its own
		if err := unix.Mount("", dir, "", propagation, ""); err != nil {
			return os.NewSyscallError("mount", err)
		}
	}
	return nil
}

// isMountPoint reports whether something is mounted at the path, whose parents may be symlinks. It does not open the path,
// because to open a socket fails, and to open a FIFO blocks.
func isMountPoint(path string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, 0, &st)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	case err != nil:
		return false, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// A volume is mounted below the pod's share, under a name that is made from its source. Containers that mount the same source
// share that mount, because virtiofsd takes the files of two mounts for different ones: a socket or a lock in one would not be
// the other's. Only a container that may do more than the mount allows gets another one (see findMount). The directory uses
// says which containers use a mount:
//
//	<dir>/shared/<name>        the mount
//	<dir>/uses/<name>/<id>     an empty file
func (o *Backend) usesDir(pod string) string { return filepath.Join(o.dir(pod), "uses") }

// removeShared unmounts all volumes of a pod and removes the directory of its share. It never deletes files inside a mount.
func (o *Backend) removeShared(pod string) error {
	dir := o.sharedDir(pod)
	if err := unmountAll(dir); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return os.RemoveAll(o.usesDir(pod))
	}
	errs := []error{err}
	for _, e := range entries {
		errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
	}
	return errors.Join(append(errs, os.Remove(dir), os.RemoveAll(o.usesDir(pod)))...)
}

// unmountAll unmounts everything at and below a path. It succeeds if the path does not exist.
func unmountAll(path string) error {
	if err := mount.UnmountRecursive(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return nil
}

// unshareContainer unmounts the volumes that no other container uses. The caller holds the lock of the pod's volumes.
func (o *Backend) unshareContainer(pod, id string) error {
	uses, err := filepath.Glob(filepath.Join(o.usesDir(pod), "*", id))
	errs := []error{err}
	for _, use := range uses {
		errs = append(errs, o.unshareVolume(pod, use))
	}
	return errors.Join(errs...)
}

// unshareVolume removes one use of a volume, and its mount with the last one. The mount goes first, so that a daemon that is
// killed in between finds the use again.
func (o *Backend) unshareVolume(pod, use string) error {
	others, err := os.ReadDir(filepath.Dir(use))
	if err != nil {
		return err
	}
	if len(others) > 1 {
		return os.Remove(use)
	}
	at := filepath.Join(o.sharedDir(pod), filepath.Base(filepath.Dir(use)))
	if err := unmountAll(at); err != nil {
		return err
	}
	if err := os.Remove(at); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return errors.Join(os.Remove(use), os.Remove(filepath.Dir(use)))
}

// volumeMount is one mount of a source below a pod's share.
type volumeMount struct {
	source string
	stat   unix.Stat_t
	// readOnly: the guest cannot write to it. live: what is mounted below the source later appears in it.
	readOnly, live bool
}

// name returns the name of the mount. A source that was replaced is another one.
func (v volumeMount) name() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%d\x00%t\x00%t", v.source, v.stat.Dev, v.stat.Ino, v.live, v.readOnly))
	return hex.EncodeToString(sum[:16])
}

// findMount returns the mount for a container that asks for one like want, and whether it exists. A mount that allows more will
// do, because the pod has those rights anyway; the guest then keeps it read-only for the container. A mount that allows less
// will not, and its rights are never extended: the guest of a pod that may only read a source must not be able to write to it.
func (o *Backend) findMount(pod string, want volumeMount) (volumeMount, bool, error) {
	for _, have := range []volumeMount{{live: true}, {}, {live: true, readOnly: true}, {readOnly: true}} {
		if have.readOnly && !want.readOnly || want.live && !have.live {
			continue
		}
		have.source, have.stat = want.source, want.stat
		if on, err := isMountPoint(filepath.Join(o.sharedDir(pod), have.name())); on || err != nil {
			return have, on, err
		}
	}
	return want, false, nil
}

// shareVolume mounts a volume of the container below the pod's share, and returns its path in the guest. A missing source is
// made, as a directory. The caller holds the lock of the pod's volumes.
func (o *Backend) shareVolume(pod, id string, m *runtimeapi.Mount) (string, error) {
	source, err := filepath.EvalSymlinks(m.GetHostPath())
	if errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(m.GetHostPath(), 0o755); err != nil {
			return "", err
		}
		source, err = m.GetHostPath(), nil
	}
	if err != nil {
		return "", err
	}
	want := volumeMount{source: source, readOnly: m.GetReadonly(),
		live: m.GetPropagation() == runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER}
	if err := unix.Stat(source, &want.stat); err != nil {
		return "", &os.PathError{Op: "stat", Path: source, Err: err}
	}
	v, on, err := o.findMount(pod, want)
	if err != nil {
		return "", err
	}
	name := v.name()
	uses := filepath.Join(o.usesDir(pod), name)
	if err := os.MkdirAll(uses, 0o700); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(uses, id), nil, 0o600); err != nil {
		return "", err
	}
	if !on {
		at := filepath.Join(o.sharedDir(pod), name)
		if err := makeMountPoint(at, v.stat.Mode&unix.S_IFMT == unix.S_IFDIR); err != nil {
			return "", err
		}
		err = v.bind(at)
	}
	return filepath.Join(guestapi.Shared, name), err
}

func makeMountPoint(at string, dir bool) error {
	if dir {
		return os.MkdirAll(at, 0o755)
	}
	f, err := os.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// bind mounts the source at the given path. The guest cannot use devices in it, and cannot write to a read-only one,
// whatever its kernel does.
func (v volumeMount) bind(at string) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, v.source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return os.NewSyscallError("open_tree", err)
	}
	tree := os.NewFile(uintptr(fd), v.source)
	defer tree.Close()
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID, Propagation: unix.MS_PRIVATE}
	if v.live {
		attr.Propagation = unix.MS_SLAVE
	}
	if v.readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return os.NewSyscallError("mount_setattr", err)
	}
	err = unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH)
	runtime.KeepAlive(tree)
	return os.NewSyscallError("move_mount", err)
}
