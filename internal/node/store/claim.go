package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/atomicfile"
)

// identityFile holds, in each of the daemon's directories, the ID of the record that the directory belongs to.
const identityFile = "record-id"

// errForeign means that the directories belong to another record.
var errForeign = errors.New("the record belongs to other directories")

// Claim checks that the record belongs to this node's directories. Call it before recovery, which removes everything
// that the record does not contain. The ID is stored beside the record and, while the node is up, beside the pods
// (fault N11). A new record has no pods to harm, so it claims the directories. Directories without an ID are new or
// from a version that stored no ID; every record claims them.
func (s *Store) Claim(dirs ...string) error {
	var unclaimed []string
	for _, dir := range dirs {
		path := filepath.Join(dir, identityFile)
		raw, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		switch id := strings.TrimSpace(string(raw)); {
		case id == s.ID():
		case id == "" || s.Fresh():
			unclaimed = append(unclaimed, path)
		default:
			return fmt.Errorf("%w: %s has the ID %s, while what is in %s belongs to the record %s; nothing was changed. "+
				"Put the right record back and start again. To go on with this one, drain and reboot the node, then remove %s",
				errForeign, s.path, s.ID(), dir, id, path)
		}
	}
	for _, path := range unclaimed {
		err := atomicfile.Write(path, []byte(s.ID()+"\n"), 0o600)
		if err != nil && !errors.Is(err, unix.EROFS) { // on a read-only file system, the next start claims the directory
			return err
		}
	}
	return nil
}
