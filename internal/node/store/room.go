package store

import (
	"errors"
	"io/fs"

	"github.com/tripod-run/tripod/internal/boltfile"
)

// Reserve makes room, so that a new record can be changed and deleted even if the disk fills up. Call it before you Put
// a new record. On a full disk it fails with the file system's errno.
func (s *Store) Reserve() error {
	err := boltfile.Reserve(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the first write creates the file
	}
	return wrapWrite(err)
}
