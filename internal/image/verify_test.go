package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
)

// layerDir returns the directory of an unpacked layer's files.
func layerDir(t *testing.T, s *Store, chain string) string {
	t.Helper()
	dirs, err := s.snapshotDirs(s.withNamespace(t.Context()))
	check(t, err)
	if dirs[chain] == "" {
		t.Fatalf("layer %s has no directory", chain)
	}
	return filepath.Join(dirs[chain], "fs")
}

func verify(t *testing.T, s *Store, contents bool) []Damage {
	t.Helper()
	found, err := s.Verify(t.Context(), contents)
	check(t, err)
	return found
}

// hasDamage reports whether the damage list has an entry with this kind and ID.
func hasDamage(found []Damage, kind, id string) bool {
	for _, d := range found {
		if d.Kind == kind && d.ID == id {
			return true
		}
	}
	return false
}

// TestFaultN6VerifyNamesAndPullMends: verify reports any damage of an image, and a pull repairs it, with and without a
// restart; a container that uses the image keeps what it has mounted.
func TestFaultN6VerifyNamesAndPullMends(t *testing.T) {
	lower, upper := tarOf(t, file("a", strings.Repeat("1", 5000)), file("b", "b")), tarOf(t, file("c", strings.Repeat("3", 5000)))
	type parts struct {
		manifest, config, blob string // files
		lower, upper           string // directories
	}
	all := func(t *testing.T, damage func(string) error, paths ...string) {
		for _, path := range paths {
			check(t, damage(path))
		}
	}
	gone := func(path string) error { return os.RemoveAll(path) }
	zero := func(path string) error { return os.Truncate(path, 0) }
	flip := func(path string) error {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		b[len(b)/2] ^= 1
		return os.WriteFile(path, b, 0o400)
	}
	for name, c := range map[string]struct {
		damage func(*testing.T, parts)
		kinds  []string
		// contents means that the damage shows only when files are read.
		contents bool
	}{
		"snapshot gone":  {func(t *testing.T, p parts) { all(t, gone, filepath.Dir(p.lower)) }, []string{"layer"}, false},
		"snapshots gone": {func(t *testing.T, p parts) { all(t, gone, filepath.Dir(p.lower), filepath.Dir(p.upper)) }, []string{"layer"}, false},
		"layer gone":     {func(t *testing.T, p parts) { all(t, gone, p.upper) }, []string{"layer"}, false},
		"layer empty":    {func(t *testing.T, p parts) { all(t, gone, p.lower+"/a", p.lower+"/b") }, []string{"layer"}, false},
		"file gone":      {func(t *testing.T, p parts) { all(t, gone, p.lower+"/a") }, []string{"layer"}, true},
		"file zero":      {func(t *testing.T, p parts) { all(t, zero, p.lower+"/a", p.upper+"/c") }, []string{"layer"}, true},
		"blob gone":      {func(t *testing.T, p parts) { all(t, gone, p.blob) }, []string{"blob"}, false},
		"blob cut":       {func(t *testing.T, p parts) { all(t, zero, p.blob) }, []string{"blob"}, false},
		"blob flipped":   {func(t *testing.T, p parts) { all(t, flip, p.blob) }, []string{"blob"}, true},
		"manifest zero":  {func(t *testing.T, p parts) { all(t, zero, p.manifest) }, []string{"blob"}, false},
		"config gone":    {func(t *testing.T, p parts) { all(t, gone, p.config) }, []string{"blob"}, false},
		"both gone":      {func(t *testing.T, p parts) { all(t, gone, p.blob, filepath.Dir(p.lower)) }, []string{"blob", "layer"}, false},
	} {
		for _, restarted := range []bool{false, true} {
			t.Run(name+map[bool]string{true: " r"}[restarted], func(t *testing.T) {
				reg, s := newRegistry(t), open(t, Config{})
				ref := reg.push(t, "app:1", imageOf(t, v1.Config{}, lower, upper))
				img := pull(t, s, ref)
				mounts, err := s.Prepare(t.Context(), "runs", img.ID, nil)
				check(t, err)
				running := mounted(t, mounts)
				kept, err := os.Open(running + "/c")
				check(t, err)
				defer kept.Close()
				if found := verify(t, s, true); len(found) != 0 {
					t.Fatalf("Verify of an intact store = %+v, want no damage", found)
				}
				e := s.index.entries()[0]
				p := parts{
					manifest: blobPath(s, img.Manifest), config: blobPath(s, digest.Digest(img.ID)), blob: blobPath(s, img.Layers[0].Digest),
					lower: layerDir(t, s, e.details.chain[0].String()), upper: layerDir(t, s, img.ChainID),
				}
				c.damage(t, p)
				if restarted {
					check(t, s.Close())
					s = open(t, Config{Root: s.cfg.Root})
				}
				if !c.contents && len(verify(t, s, false)) == 0 {
					t.Error("Verify without contents found no damage")
				}
				found := verify(t, s, true)
				named := len(found) > 0
				for _, kind := range c.kinds {
					one := false
					for _, d := range found {
						one = one || d.Kind == kind || d.Kind == "image" // removed from the list at the start
					}
					named = named && one
				}
				if !named {
					t.Errorf("Verify() = %+v, want damage of the kinds %v", found, c.kinds)
				}

				img = pull(t, s, ref)
				if found := verify(t, s, true); len(found) != 0 {
					t.Errorf("Verify after the pull = %+v, want no damage", found)
				}
				mounts, err = s.Prepare(t.Context(), "new", img.ID, nil)
				check(t, err)
				root := mounted(t, mounts)
				if read(t, root+"/a") != strings.Repeat("1", 5000) || read(t, root+"/b") != "b" || read(t, root+"/c") != strings.Repeat("3", 5000) {
					t.Error("a new container does not have the image's files")
				}
				check(t, os.WriteFile(running+"/written", []byte("still"), 0o600))
				if b, err := os.ReadFile(running + "/written"); err != nil || string(b) != "still" {
					t.Errorf("file of the running container: got %q, %v; want still", b, err)
				}
				if _, err := kept.Seek(0, 0); err != nil {
					t.Error(err)
				}
				// The container's mounts can be mounted again over the repaired layers.
				mounts, err = s.Mounts(t.Context(), "runs")
				check(t, err)
				if again := mounted(t, mounts); read(t, again+"/a") != strings.Repeat("1", 5000) || read(t, again+"/written") != "still" {
					t.Error("the running container does not have its files after another mount")
				}
			})
		}
	}
}

// TestFaultN6LostLayerIsPulledAgain: no container is made over a missing layer, and the image is no longer listed, so
// that it is pulled again.
func TestFaultN6LostLayerIsPulledAgain(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2"))))
	img := pull(t, s, ref)
	check(t, os.RemoveAll(filepath.Dir(layerDir(t, s, img.ChainID))))
	if _, err := s.Prepare(t.Context(), "c", img.ID, nil); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "pull it again") {
		t.Errorf("Prepare without the layers: got error %v, want not found and the remedy", err)
	}
	if _, err := s.Get(t.Context(), ref); !errdefs.IsNotFound(err) {
		t.Errorf("Get of an image without its layers: got error %v, want not found", err)
	}
	if keys, err := s.Snapshots(t.Context()); err != nil || len(keys) != 0 {
		t.Errorf("Snapshots() = %v, %v; want none", keys, err)
	}
	mounts, err := s.Prepare(t.Context(), "c", pull(t, s, ref).ID, nil)
	check(t, err)
	if root := mounted(t, mounts); read(t, root+"/a")+read(t, root+"/b") != "12" {
		t.Error("the image's files are missing after another pull")
	}
}

// TestFaultN6RemoveAndPullMends: removing and then pulling an image repairs it, even while a container uses the damaged
// layer.
func TestFaultN6RemoveAndPullMends(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	img := pull(t, s, ref)
	_, err := s.Prepare(t.Context(), "runs", img.ID, nil)
	check(t, err)
	dir := layerDir(t, s, img.ChainID)
	check(t, os.RemoveAll(filepath.Dir(dir)))
	check(t, s.Remove(t.Context(), ref))
	check(t, s.Collect(t.Context()))
	pull(t, s, ref)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) == 0 {
		t.Errorf("the layer's directory: got %v, %v; want files", entries, err)
	}
}

// TestVerifyReportsContainers: a container's writable layer cannot be pulled; the layers below list it as a user.
func TestVerifyReportsContainers(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "text")))
	_, err := s.Prepare(t.Context(), "runs", img.ID, nil)
	check(t, err)
	check(t, os.RemoveAll(s.layerDir("runs")))
	check(t, os.RemoveAll(layerDir(t, s, img.ChainID)))
	found := verify(t, s, false)
	if !hasDamage(found, "container", "runs") || !hasDamage(found, "layer", img.ChainID) {
		t.Errorf("Verify() = %+v, want damage of the container runs and of the layer %s", found, img.ChainID)
	}
	for _, d := range found {
		if d.Kind == "layer" && (len(d.Users) != 1 || d.Users[0] != "runs") {
			t.Errorf("Users of the layer: got %v, want runs", d.Users)
		}
	}
}
