package main

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// erofsUUID identifies the disks that erofs makes. It is fixed, so that the same tree gives the same bytes.
const erofsUUID = "74726970-6f64-8000-8000-677565737430"

// erofs packs the tree as a read-only disk. All files are root's and have no dates. The disk is uncompressed, because an
// emulated machine is slow at decompressing. Hard links become symbolic links. dir is for temporary files.
func (t tree) erofs(ctx context.Context, dir string) ([]byte, error) {
	dir, err := os.MkdirTemp(dir, "erofs-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	root, disk := filepath.Join(dir, "root"), filepath.Join(dir, "disk")
	if err := t.write(root); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, "mkfs.erofs", "-d0", "--quiet", "-x-1", "-T0", "-U"+erofsUUID, "--all-root", disk,
		root).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("mkfs.erofs (Debian: erofs-utils): %w\n%s", err, bytes.TrimSpace(out))
	}
	return os.ReadFile(disk)
}

// write writes the tree's files, without their owners, to a new directory.
func (t tree) write(root string) error {
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(t)) { // a directory comes before what is in it
		e, path := t[name], filepath.Join(root, name)
		var err error
		switch e.typ {
		case tar.TypeDir:
			err = os.Mkdir(path, 0o755)
		case tar.TypeSymlink:
			err = os.Symlink(e.link, path)
		case tar.TypeLink:
			err = os.Symlink("/"+e.link, path)
		default:
			err = os.WriteFile(path, e.data, 0o644)
		}
		if err == nil && (e.typ == tar.TypeDir || e.typ == tar.TypeReg) {
			err = unix.Chmod(path, uint32(e.mode)) // with the sticky bit, and whatever the umask is
		}
		if err != nil {
			return err
		}
	}
	return nil
}
