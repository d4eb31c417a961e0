package mnt

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
)

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
