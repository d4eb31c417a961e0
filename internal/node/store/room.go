package store

import (
	"errors"
	"io/fs"

	"github.com/tripod-run/tripod/internal/boltfile"
)

// Reserve makes sure that the next record can still be changed and deleted if the disk fills up. Call it before recording
// something new. On a full disk it fails with the file system's errno.
func (s *Store) Reserve() error {
	err := boltfile.Reserve(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the first write creates the file
	}
	return wrapWrite(err)
}
