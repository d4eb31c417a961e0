package mnt

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
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

// CloneReadOnly returns a detached, read-only clone of the mount at source. If users is not nil, the clone is mapped.
func CloneReadOnly(source string, users *os.File) (*os.File, error) {
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

// MappedView mounts an image's read-only file system for a pod with a user namespace.
func MappedView(mounts []mount.Mount, users *os.File, dir string) error {
	if IsMounted(dir) {
		return nil
	}
	if optionOf(mounts, "lowerdir") != "" {
		return mountMapped(mounts[0].Options, users, dir)
	}
	tree, err := CloneReadOnly(mounts[0].Source, users)
	if err != nil {
		return err
	}
	return attach(tree, dir)
}

// ProbeMapped returns an error unless mounts of one of the directories can be mapped. Whether volumes can be mapped
// depends on their file systems, which are not known yet.
func ProbeMapped(userns string, dirs ...string) error {
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
	err := OnNewThread(func() (err error) {
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
