package linux

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// Files of the node have other owners inside a user namespace. A mapped mount (mount_setattr(2), MOUNT_ATTR_IDMAP)
// translates them: what belongs to the node's user 0 belongs to the pod's user 0. Tripod makes these mounts itself, so
// that they work with every OCI runtime. An overlay cannot be mapped, but its lower layers can (Linux 5.19).

// cloneTree returns a detached clone of the mounts at source, and below it if recursive is set. The clone does not
// propagate mounts to the node; if slave is set, it receives the node's. If users is not nil, the clone is mapped. Mounts
// below source that their file systems cannot map stay as they are.
func cloneTree(source string, recursive, slave bool, users *os.File) (*os.File, error) {
	var below uint = unix.AT_RECURSIVE
	if !recursive {
		below = 0
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|below)
	if err != nil {
		return nil, fmt.Errorf("clone the mount of %s: %w", source, err)
	}
	tree := os.NewFile(uintptr(fd), source)
	attr := unix.MountAttr{Propagation: unix.MS_PRIVATE}
	if slave {
		attr.Propagation = unix.MS_SLAVE
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|below, &attr)
	if err == nil && users != nil {
		attr = unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users.Fd())}
		if err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|below, &attr); err != nil && recursive {
			err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr)
		}
		if err != nil {
			err = fmt.Errorf("map its owners (file system %s): %w", fsType(source), err)
		}
		runtime.KeepAlive(users)
	}
	if err != nil {
		tree.Close()
		return nil, fmt.Errorf("clone the mount of %s: %w", source, err)
	}
	return tree, nil
}

// cloneReadOnly returns a detached, read-only clone of the mount at source. If users is not nil, the clone is mapped.
func cloneReadOnly(source string, users *os.File) (*os.File, error) {
	tree, err := cloneTree(source, false, false, users)
	if err != nil {
		return nil, err
	}
	if err := unix.MountSetattr(int(tree.Fd()), "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		tree.Close()
		return nil, fmt.Errorf("make the clone of %s read-only: %w", source, err)
	}
	return tree, nil
}

// fsType names a path's file system by its magic number, as statfs(2) lists them.
func fsType(path string) string {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return "unknown"
	}
	if st.Type == unix.TMPFS_MAGIC {
		return "tmpfs, which needs Linux 6.3"
	}
	return fmt.Sprintf("%#x", st.Type)
}

// attach mounts a detached tree and closes it.
func attach(tree *os.File, target string) error {
	defer tree.Close()
	if err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount a clone on %s: %w", target, err)
	}
	return nil
}

// cannotMap reports whether an error says that the kernel or a file system cannot map owners.
func cannotMap(err error) bool {
	return slices.ContainsFunc([]error{unix.EINVAL, unix.EPERM, unix.EOPNOTSUPP, unix.ENOSYS}, func(e error) bool { return errors.Is(err, e) })
}

// copiedFile marks a container whose image could not be mapped to the pod's user namespace, and copyingFile one whose
// image's files are still being copied.
func copiedFile(bundle string) string  { return filepath.Join(bundle, "copied") }
func copyingFile(bundle string) string { return filepath.Join(bundle, "copying") }

// mountMappedLayer mounts a container's writable layer for a pod with a user namespace. If the layers below cannot be
// mapped, it changes the owners of all files instead, which copies them to the container's layer, and marks the bundle.
func (b *Backend) mountMappedLayer(ctx context.Context, p *sandbox.Pod, mounts []mount.Mount, bundle string) error {
	users, err := openUsers(p, b.cfg.podRunDir(p.ID))
	if err != nil {
		return err
	}
	defer users.Close()
	if err := ledger.RemoveFile(copyingFile(bundle)); err != nil { // of an interrupted attempt
		return err
	}
	dir := rootfsDir(bundle)
	if upper := optionOf(mounts, "upperdir"); upper != "" {
		if err := shiftOwner(upper, *p.IDMap()); err != nil {
			return err
		}
		err := mountMapped(mounts[0].Options, users, dir)
		if err == nil || !cannotMap(err) {
			return err
		}
		b.log.Warn("the image's layers cannot be mapped to the pod's users; copying all files to the container's layer", "pod", p.ID, "err", err)
	}
	if err := os.WriteFile(copyingFile(bundle), nil, 0o600); err != nil {
		return err
	}
	if err := mountOn(mounts, dir); err != nil {
		return err
	}
	if err := continueCopy(ctx, p, bundle); err != nil {
		return errors.Join(err, unmount(dir))
	}
	return nil
}

// continueCopy copies the files of a mounted image if that has begun and has not ended.
func continueCopy(ctx context.Context, p *sandbox.Pod, bundle string) error {
	if !exists(copyingFile(bundle)) {
		return nil
	}
	if err := shiftOwners(ctx, rootfsDir(bundle), *p.IDMap()); err != nil {
		return err
	}
	return os.Rename(copyingFile(bundle), copiedFile(bundle))
}

// mountMappedView mounts an image's read-only file system for a pod with a user namespace.
func mountMappedView(mounts []mount.Mount, users *os.File, dir string) error {
	if mountedOn(dir) {
		return nil
	}
	if optionOf(mounts, "lowerdir") != "" {
		return mountMapped(mounts[0].Options, users, dir)
	}
	tree, err := cloneReadOnly(mounts[0].Source, users)
	if err != nil {
		return err
	}
	return attach(tree, dir)
}

// probeMappedMounts returns an error unless mounts of one of the directories can be mapped. Whether volumes can be mapped
// depends on their file systems, which are not known yet.
func probeMappedMounts(userns string, dirs ...string) error {
	users, err := os.Open(userns)
	if err != nil {
		return err
	}
	defer users.Close()
	for _, dir := range dirs {
		var tree *os.File
		if tree, err = cloneTree(dir, false, false, users); err == nil {
			return tree.Close()
		}
	}
	return err
}

// optionOf returns the value of an option of an overlay, or "".
func optionOf(mounts []mount.Mount, name string) string {
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		return ""
	}
	for _, option := range mounts[0].Options {
		if value, ok := strings.CutPrefix(option, name+"="); ok {
			return value
		}
	}
	return ""
}

// mountMapped mounts an overlay with mapped lower layers on dir. The clones of the layers are mounted in a mount
// namespace of their own, which ends with the call, even if the daemon is killed.
func mountMapped(options []string, users *os.File, dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var tree *os.File
	err := onNewThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=700"); err != nil {
			return err
		}
		if err := unix.Chdir(dir); err != nil { // the thread's own, since it left the node's mount namespace
			return err
		}
		if options, err = mapLayers(options, users); err != nil {
			return err
		}
		if err := unix.Mkdir("merged", 0o700); err != nil {
			return err
		}
		if err := unix.Mount("overlay", "merged", "overlay", 0, strings.Join(options, ",")); err != nil {
			return fmt.Errorf("overlay: %w", err)
		}
		tree, err = cloneTree("merged", false, false, nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("mount mapped layers on %s: %w", dir, err)
	}
	return attach(tree, dir)
}

// mapLayers mounts mapped clones of an overlay's lower layers in the current directory, and returns the options that
// name the clones.
func mapLayers(options []string, users *os.File) ([]string, error) {
	options = slices.Clone(options)
	for i, option := range options {
		layers, ok := strings.CutPrefix(option, "lowerdir=")
		if !ok {
			continue
		}
		var names []string
		for n, layer := range strings.Split(layers, ":") {
			name := strconv.Itoa(n)
			if err := unix.Mkdir(name, 0o700); err != nil {
				return nil, err
			}
			tree, err := cloneTree(layer, false, false, users)
			if err != nil {
				return nil, err
			}
			if err := attach(tree, name); err != nil {
				return nil, err
			}
			names = append(names, name)
		}
		options[i] = "lowerdir=" + strings.Join(names, ":")
	}
	return options, nil
}

// shiftOwners changes the owners of all files below root from the node's users, beginning with 0, to a map's. It can be
// repeated.
func shiftOwners(ctx context.Context, root string, ids sandbox.IDMap) error {
	err := filepath.WalkDir(root, func(name string, _ fs.DirEntry, err error) error {
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return err
		}
		return shiftOwner(name, ids)
	})
	if err != nil {
		return fmt.Errorf("change the owners of %s: %w", root, err)
	}
	return nil
}

// capabilityAttr is the extended attribute with a program's capabilities.
const capabilityAttr = "security.capability"

// shiftOwner changes the owner of one file, but keeps its mode and capabilities, which chown(2) removes. It leaves IDs
// that the map does not map, or that are shifted already.
func shiftOwner(name string, ids sandbox.IDMap) error {
	info, err := os.Lstat(name)
	if err != nil {
		return err
	}
	st := info.Sys().(*syscall.Stat_t)
	uid, gid := shifted(st.Uid, ids.Users), shifted(st.Gid, ids.Groups)
	if uid == st.Uid && gid == st.Gid {
		return nil
	}
	caps := make([]byte, 64)
	n, capErr := unix.Lgetxattr(name, capabilityAttr, caps)
	if err := os.Lchown(name, int(uid), int(gid)); err != nil {
		return err
	}
	if info.Mode()&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
		if err := unix.Chmod(name, st.Mode&0o7777); err != nil {
			return err
		}
	}
	if capErr != nil {
		return nil
	}
	return unix.Lsetxattr(name, capabilityAttr, ownedBy(caps[:n], ids.Users.First), 0)
}

// shifted returns the node's ID for an image's ID.
func shifted(id uint32, r sandbox.IDRange) uint32 {
	if id >= r.Length || id >= r.First && id-r.First < r.Length {
		return id
	}
	return r.First + id
}

// ownedBy returns a file's capabilities in version 3 of the attribute, which names the root user of the user namespace
// in which they count (include/uapi/linux/capability.h).
func ownedBy(attr []byte, root uint32) []byte {
	const version3, dataSize = 3, 20
	if len(attr) < dataSize {
		return attr
	}
	out := slices.Clone(attr[:dataSize])
	out[3] = version3
	return append(out, byte(root), byte(root>>8), byte(root>>16), byte(root>>24))
}

// exposeDir returns the directory of what expose mounts for a container.
func exposeDir(runDir, id string) string { return filepath.Join(runDir, "mounts", id) }

// expose lets a container in a user namespace reach its root file system and volumes, which lie in directories that
// only the node's root can enter: it mounts clones below the pod's directory, mapped where the specification says so,
// and changes the specification to these clones.
func (b *Backend) expose(p *sandbox.Pod, id string, config *specs.Spec) error {
	run := b.cfg.podRunDir(p.ID)
	if err := unexpose(run, id); err != nil {
		return err
	}
	users, err := openUsers(p, run)
	if err != nil {
		return err
	}
	defer users.Close()
	dir := exposeDir(run, id)
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o755)); err != nil {
		return err
	}
	root := specs.Mount{Source: config.Root.Path}
	if err := exposeMount(&root, filepath.Join(dir, "rootfs"), users); err != nil {
		return err
	}
	config.Root.Path = root.Source
	for i := range config.Mounts {
		m := &config.Mounts[i]
		if m.Type != "bind" || strings.HasPrefix(m.Source, run+"/") {
			continue
		}
		if err := exposeMount(m, filepath.Join(dir, strconv.Itoa(i)), users); err != nil {
			return fmt.Errorf("mount for %s: %w", m.Destination, err)
		}
	}
	return nil
}

// exposed reports whether a container has all its clones, if it needs any.
func (b *Backend) exposed(p *sandbox.Pod, id string) bool {
	return p.IDMap() == nil || mountedOn(filepath.Join(exposeDir(b.cfg.podRunDir(p.ID), id), "rootfs"))
}

// exposeMount mounts a clone of a mount's source on target, and makes the clone the source.
func exposeMount(m *specs.Mount, target string, users *os.File) error {
	if m.UIDMappings == nil {
		users = nil
	}
	tree, err := cloneTree(m.Source, slices.Contains(m.Options, "rbind"), slices.Contains(m.Options, "rslave"), users)
	if cannotMap(err) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return err
	}
	if err := makeMountPoint(tree, target); err != nil {
		tree.Close()
		return err
	}
	m.Source, m.UIDMappings, m.GIDMappings = target, nil, nil
	return attach(tree, target)
}

// makeMountPoint creates an empty directory or file, depending on what will be mounted on it.
func makeMountPoint(tree *os.File, target string) error {
	info, err := tree.Stat()
	if err != nil {
		return err
	}
	if info.IsDir() {
		return os.MkdirAll(target, 0o700)
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_RDONLY, 0o400)
	if err != nil {
		return err
	}
	return f.Close()
}

// unexposeAll removes the clones of all of a pod's containers.
func unexposeAll(runDir string) error {
	var errs []error
	for _, id := range idsIn(exposeDir(runDir, "")) {
		errs = append(errs, unexpose(runDir, id))
	}
	return errors.Join(append(errs, ledger.RemoveFile(exposeDir(runDir, "")))...)
}

// unexpose removes a container's clones, and fails rather than delete a file in a volume.
func unexpose(runDir, id string) error {
	dir := exposeDir(runDir, id)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, removeMountPoint(filepath.Join(dir, e.Name())))
	}
	return errors.Join(err, ledger.RemoveFile(dir))
}
