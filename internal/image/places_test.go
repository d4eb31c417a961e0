package image

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// otherFileSystem mounts a tmpfs for the duration of a test.
func otherFileSystem(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	check(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700"))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// wantNames waits until a directory contains these files.
func wantNames(t testing.TB, dir string, want ...string) {
	t.Helper()
	eventually(t, func() error {
		var got []string
		entries, err := os.ReadDir(dir)
		for _, e := range entries {
			got = append(got, e.Name())
		}
		if err != nil || !slices.Equal(got, want) {
			return fmt.Errorf("%s: got %q, error %v; want %q", dir, got, err, want)
		}
		return nil
	})
}

// prepare makes a container's layer, and returns its mounts.
func prepare(t testing.TB, s *Store, key, image string) string {
	t.Helper()
	mounts, err := s.Prepare(t.Context(), key, image, nil)
	check(t, err)
	return fmt.Sprint(mounts)
}

// Containers write to another file system, and both are reported.
func TestContainersDir(t *testing.T) {
	reg, containers := newRegistry(t), otherFileSystem(t)
	s := open(t, Config{ContainersDir: containers})
	for key, ref := range map[string]string{
		"one":  reg.push(t, "one:1", oneFileImage(t, "text")),
		"many": reg.push(t, "many:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "lower")), tarOf(t, file("a", "text")))),
	} {
		img := pull(t, s, ref)
		mounts, err := s.Prepare(t.Context(), key, img.ID, nil)
		check(t, err)
		if again := prepare(t, s, key, img.ID); again != fmt.Sprint(mounts) {
			t.Errorf("%s: a repeated Prepare returns %s, want %v", key, again, mounts)
		}
		check(t, os.WriteFile(filepath.Join(mounted(t, mounts), "written"), make([]byte, 1<<20), 0o600))
		if info, err := os.Stat(filepath.Join(s.place(containers), key, "fs", "written")); err != nil || info.Size() != 1<<20 {
			t.Errorf("%s: the written file is not on the other file system: %v", key, err)
		}
		if u, err := s.layerUsage(t.Context(), key); err != nil || u.Size < 1<<20 || u.Inodes < 2 {
			t.Errorf("%s: measured %+v, error %v; want at least 1 MiB", key, u, err)
		}
		if u, err := s.Usage(t.Context(), key); err != nil || u.Mountpoint != containers || u.Timestamp.IsZero() {
			t.Errorf("%s: usage %+v, error %v; want one of %s", key, u, err, containers)
		}
	}
	if found := verify(t, s, false); len(found) > 0 {
		t.Errorf("Verify() = %+v, want no damage", found)
	}
	images, err := s.FsInfo(t.Context())
	check(t, err)
	writable, err := s.ContainerFsInfo(t.Context())
	check(t, err)
	if images.Mountpoint != s.cfg.Root || writable.Mountpoint != containers {
		t.Errorf("got the mount points %s and %s, want %s and %s", images.Mountpoint, writable.Mountpoint, s.cfg.Root, containers)
	}
}

// A container keeps its layer over restarts and changes of the configuration.
func TestContainersDirChanges(t *testing.T) {
	reg, containers, root := newRegistry(t), otherFileSystem(t), filepath.Join(t.TempDir(), "image")
	s := open(t, Config{Root: root})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "text")))
	inside := prepare(t, s, "inside", img.ID)
	check(t, s.Close())

	s = open(t, Config{Root: root, ContainersDir: containers})
	if got := prepare(t, s, "inside", img.ID); got != inside {
		t.Errorf("the layer of an existing container moved: got %s, want %s", got, inside)
	}
	outside := prepare(t, s, "outside", img.ID)
	check(t, s.Close())

	s = open(t, Config{Root: root})
	if got := prepare(t, s, "outside", img.ID); got != outside {
		t.Errorf("the layer of an existing container moved: got %s, want %s", got, outside)
	}
	if u, err := s.Usage(t.Context(), "outside"); err != nil || u.Mountpoint != containers {
		t.Errorf("usage %+v, error %v; want one of %s", u, err, containers)
	}
	for _, key := range []string{"inside", "outside", "outside"} {
		check(t, s.Release(t.Context(), key))
	}
	wantNames(t, s.place(containers))
	wantNames(t, s.place(""))
}

// Files that a crash left behind are removed, also after a change of the configuration. Those of other stores stay.
func TestContainersDirAfterACrash(t *testing.T) {
	reg, containers, root := newRegistry(t), otherFileSystem(t), filepath.Join(t.TempDir(), "image")
	s, other := open(t, Config{Root: root, ContainersDir: containers}), open(t, Config{ContainersDir: containers})
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	img := pull(t, s, ref)
	pull(t, other, ref)
	for _, key := range []string{"whole", "damaged", "made", "released"} {
		prepare(t, s, key, img.ID)
	}
	prepare(t, other, "theirs", img.ID)
	check(t, s.Close())
	place, own := s.place(containers), s.place("")
	check(t, os.WriteFile(filepath.Join(own, "damaged", layerFile), nil, 0o600))
	check(t, os.Rename(filepath.Join(own, "made"), filepath.Join(own, beingMade+"made")))
	check(t, discard(place, "released"))
	check(t, discard(own, "released"))
	check(t, os.Mkdir(filepath.Join(place, "%zz"), 0o700))

	s = open(t, Config{Root: root})
	wantNames(t, place, "damaged", "whole")
	wantNames(t, own, "damaged", "whole")
	check(t, s.Release(t.Context(), "damaged"))
	wantNames(t, place, "whole")
	check(t, os.RemoveAll(filepath.Join(place, "whole")))
	if _, err := s.Mounts(t.Context(), "whole"); !errdefs.IsNotFound(err) {
		t.Errorf("Mounts of a layer whose files are missing: got error %v, want not found", err)
	}
	check(t, s.Release(t.Context(), "whole"))
	wantNames(t, other.place(containers), "theirs")
}

// A layer that cannot be made leaves nothing behind, and can be made later.
func TestContainersDirThatIsFull(t *testing.T) {
	reg, containers := newRegistry(t), otherFileSystem(t)
	s := open(t, Config{ContainersDir: containers})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "text")))
	check(t, unix.Mount("", containers, "", unix.MS_REMOUNT, "nr_inodes=5")) // 3 are directories in use
	if _, err := s.Prepare(t.Context(), "c", img.ID, nil); !errdefs.IsResourceExhausted(err) {
		t.Errorf("Prepare on a full file system: got error %v, want an exhausted resource", err)
	}
	wantNames(t, s.place(containers))
	wantNames(t, s.place(""))
	check(t, unix.Mount("", containers, "", unix.MS_REMOUNT, "nr_inodes=100"))
	prepare(t, s, "c", img.ID)
}

func TestContainersDirIsAbsolute(t *testing.T) {
	if _, err := Open(t.Context(), Config{Root: t.TempDir(), ContainersDir: "layers"}); err == nil {
		t.Error("Open accepts a relative containers directory")
	}
}

// A containers directory that is missing, because its file system is not mounted, is not made: the store waits for it.
func TestContainersDirThatIsMissing(t *testing.T) {
	reg, containers := newRegistry(t), filepath.Join(t.TempDir(), "mount", "point")
	s := open(t, Config{ContainersDir: containers})
	wantError(t, s.Err(), errdefs.IsUnavailable, containers)
	if _, err := os.Stat(containers); !os.IsNotExist(err) {
		t.Errorf("the directory exists: %v", err)
	}
	check(t, os.MkdirAll(containers, 0o700))
	eventually(t, s.Err)
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "text")))
	check(t, os.RemoveAll(containers)) // unmounted while the store is open
	if _, err := s.Prepare(t.Context(), "c", img.ID, nil); err == nil {
		t.Error("Prepare makes a layer in a directory that is missing")
	}
	if _, err := os.Stat(containers); !os.IsNotExist(err) {
		t.Errorf("the directory was made: %v", err)
	}
}

// A stop does not wait for the removal of released layers. The next process removes them.
func TestCloseLeavesReleasedLayers(t *testing.T) {
	root := filepath.Join(t.TempDir(), "image")
	s := open(t, Config{Root: root})
	check(t, s.Close())
	own := s.place("")
	check(t, os.Mkdir(filepath.Join(own, beingRemoved+"c"), 0o700))
	check(t, s.removeReleased())
	wantNames(t, own, beingRemoved+"c")
	wantNames(t, open(t, Config{Root: root}).place(""))
}
