package image

import (
	"fmt"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/boltfile"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// reserve makes room in both metadata files, so that the caller's next object can be removed even if the disk fills up.
// On a full disk it returns errdefs.ErrResourceExhausted.
func (s *Store) reserve() error {
	for _, name := range []string{metadataFile, snapshotsFile} {
		err := boltfile.Reserve(filepath.Join(s.cfg.Root, name))
		if err != nil && !failure.IsGone(err) { // missing: no snapshot has ever been made
			return fmt.Errorf("image store: %w", failure.WithClass(err))
		}
	}
	return nil
}
