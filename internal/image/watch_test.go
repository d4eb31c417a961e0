package image

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tripod-run/tripod/test/until"
)

// TestChanges checks that a watcher learns of pulled and removed images, and that changes which it has not yet received
// are one.
func TestChanges(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	changes := s.Changes()
	changed := func() bool {
		select {
		case <-changes:
			return true
		default:
			return false
		}
	}
	if changed() {
		t.Error("a new watcher has a change")
	}
	one, two := reg.push(t, "one:1", oneFileImage(t, "1")), reg.push(t, "two:1", oneFileImage(t, "2"))
	pull(t, s, one)
	pull(t, s, two)
	if !changed() || changed() {
		t.Error("two pulls are not one change")
	}
	check(t, s.Remove(t.Context(), two))
	if !changed() {
		t.Error("a removal is no change")
	}
}

// TestDerivedFilesCount checks that the usage of images includes that of files which other parts make from them, and
// that their directory need not exist.
func TestDerivedFilesCount(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "derived")
	s := open(t, Config{DerivedDirs: []string{dir}})
	// The store makes files of its own after it was opened, so the difference is exact only once it is done.
	until.Holds(t, "usage grows by 1 MiB and two inodes", func() bool {
		check(t, os.RemoveAll(dir))
		before, _, err := s.measure(s.base)
		check(t, err)
		check(t, os.MkdirAll(dir, 0o700))
		check(t, os.WriteFile(filepath.Join(dir, "code"), make([]byte, 1<<20), 0o600))
		after, _, err := s.measure(s.base)
		check(t, err)
		grown, inodes := after.UsedBytes-before.UsedBytes, after.InodesUsed-before.InodesUsed
		t.Logf("usage grew by %d bytes and %d inodes", grown, inodes)
		return grown >= 1<<20 && inodes == 2
	})
}
