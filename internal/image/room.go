package image

import (
	"fmt"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/boltfile"
)

// reserve makes room in both metadata files, so that the caller's next object can be removed even if the disk fills up.
// On a full disk it returns errdefs.ErrResourceExhausted.
func (s *Store) reserve() error {
	for _, name := range []string{metadataFile, snapshotsFile} {
		err := boltfile.Reserve(filepath.Join(s.cfg.Root, name))
		if err != nil && !isGone(err) { // missing: no snapshot has ever been made
			return fmt.Errorf("image store: %w", withClass(err))
		}
	}
	return nil
}
