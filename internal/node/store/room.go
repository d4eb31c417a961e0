package store

import (
	"errors"
	"io/fs"

	"github.com/tripod-run/tripod/internal/boltroom"
)

// Reserve makes sure that what is recorded next can be changed and deleted again on a disk that gets full meanwhile. Who records
// something new calls it first. On a full disk it fails with the errno of that.
func (s *Store) Reserve() error {
	err := boltroom.Keep(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the first write makes it
	}
	return wrapWrite(err)
}
