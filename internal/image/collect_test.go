package image

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// files counts blobs and snapshot directories.
func files(t testing.TB, s *Store) (blobs, snapshots int) {
	t.Helper()
	for dir, n := range map[string]*int{"content/blobs/sha256": &blobs, "content/ingest": &blobs, "snapshots/snapshots": &snapshots} {
		entries, err := os.ReadDir(filepath.Join(s.cfg.Root, dir))
		check(t, err)
		*n += len(entries)
	}
	return blobs, snapshots
}

// wantEmpty collects garbage and checks that no blobs and snapshots remain.
func wantEmpty(t testing.TB, s *Store) {
	t.Helper()
	// The collection that follows Open may be under way; it makes and removes temporary snapshots.
	eventually(t, func() error {
		check(t, s.Collect(t.Context()))
		if blobs, snapshots := files(t, s); blobs+snapshots != 0 {
			return fmt.Errorf("%d blobs and %d snapshots are left", blobs, snapshots)
		}
		return nil
	})
}

func TestRemoveTakesAllNamesAndContent(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	src := imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2")))
	ref := reg.push(t, "app:1", src)
	pull(t, s, ref)
	img := pull(t, s, reg.push(t, "app:2", src))
	check(t, s.Remove(t.Context(), ref))
	for _, name := range append(img.RepoTags, img.RepoDigests[0], img.ID) {
		if _, err := s.Get(t.Context(), name); !errdefs.IsNotFound(err) {
			t.Errorf("Get(%q) of a removed image: got error %v, want not found", name, err)
		}
		wantError(t, s.Remove(t.Context(), name), errdefs.IsNotFound)
	}
	wantEmpty(t, s)
}

func TestRemoveKeepsWhatOthersUse(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	base := tarOf(t, file("base", "b"))
	one := pull(t, s, reg.push(t, "one:1", imageOf(t, v1.Config{}, base, tarOf(t, file("one", "1")))))
	two := pull(t, s, reg.push(t, "two:1", imageOf(t, v1.Config{}, base, tarOf(t, file("two", "2")))))
	mounts, err := s.Prepare(t.Context(), "c1", one.ID, nil)
	check(t, err)
	check(t, s.Remove(t.Context(), one.ID))
	check(t, s.Collect(t.Context()))

	root := mounted(t, mounts)
	if read(t, root+"/base")+read(t, root+"/one") != "b1" {
		t.Error("the container's image files are missing after Remove")
	}
	mounts, err = s.Prepare(t.Context(), "c2", two.ID, nil)
	check(t, err)
	root = mounted(t, mounts)
	if read(t, root+"/base")+read(t, root+"/two") != "b2" {
		t.Error("the files of the other image are missing after Remove")
	}
}

func TestReleaseFreesTheImage(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "x")))
	_, err := s.Prepare(t.Context(), "c1", img.ID, nil)
	check(t, err)
	_, err = s.View(t.Context(), "c1/volume", img.ID)
	check(t, err)
	check(t, s.Remove(t.Context(), img.ID))
	check(t, s.Release(t.Context(), "c1"))
	check(t, s.Release(t.Context(), "c1/volume"))
	check(t, s.Release(t.Context(), "c1"))
	wantEmpty(t, s)
}

func TestEverythingIsPrivate(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	pull(t, s, reg.push(t, "app:1", oneFileImage(t, "x")))
	check(t, filepath.WalkDir(s.cfg.Root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.IsDir() && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: got mode %v, want no permissions for group and others", path, info.Mode())
		}
		// Files in a layer have the image's modes, behind directories that only root can enter.
		if filepath.Dir(path) == filepath.Join(s.cfg.Root, "snapshots", "snapshots") {
			return filepath.SkipDir
		}
		return nil
	}))
}

func TestOpenTwiceIsRefused(t *testing.T) {
	s := open(t, Config{})
	_, err := Open(t.Context(), Config{Root: s.cfg.Root, Logger: testLogger(t)})
	wantError(t, err, errdefs.IsFailedPrecondition, "another process", s.cfg.Root)
}
