// Package atomicfile replaces files so that a reader, or the next process after a crash of this one, finds either the
// old content or the new content.
package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/synced"
)

// Replace replaces the file at path. The file gets exactly the given mode, regardless of the umask. Replace does not
// sync: the page cache survives a crash of the process, but after a power failure the file may be empty. A file can
// have only one writer at a time, because Replace always writes the new content to PATH.new first.
func Replace(path string, content []byte, mode fs.FileMode) error {
	return replace(path, content, mode, false)
}

// Write is like Replace, but also syncs: when it returns nil, the new content is on the disk. A power failure leaves
// either the old content or the new content.
func Write(path string, content []byte, mode fs.FileMode) error {
	if err := replace(path, content, mode, true); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	synced.Add(2)
	return errors.Join(dir.Sync(), dir.Close())
}

func replace(path string, content []byte, mode fs.FileMode, sync bool) error {
	draft := path + ".new"
	f, err := os.OpenFile(draft, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil && sync {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(draft, path)
	}
	if err != nil {
		_ = os.Remove(draft)
	}
	return err
}
