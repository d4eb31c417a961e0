package image

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/boltfile"
)

// reserve makes sure that what is made next can be released even if the disk fills up: both metadata files have room for
// changes. On a full disk it returns errdefs.ErrResourceExhausted.
func (s *Store) reserve() error {
	for _, name := range []string{"metadata.db", "snapshots/metadata.db"} {
		err := boltfile.Reserve(filepath.Join(s.cfg.Root, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // no snapshot has ever been made
		}
		if err != nil {
			if class := classOf(err); class != nil {
				return fmt.Errorf("image store: %w (%w)", err, class)
			}
			return fmt.Errorf("image store: %w", err)
		}
	}
	return nil
}
