package image

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// filesOf makes an artifact of files; those whose name begins with "-" have no title.
func filesOf(t testing.TB, names ...string) *rawImage {
	t.Helper()
	img := raw(t)
	img.manifest.Config = img.add(ocispec.MediaTypeEmptyJSON, []byte("{}"))
	img.manifest.ArtifactType = "application/vnd.example.model"
	for _, name := range names {
		layer := img.add("application/vnd.example.file", []byte("content of "+name))
		if !strings.HasPrefix(name, "-") {
			layer.Annotations = map[string]string{ocispec.AnnotationTitle: name}
		}
		img.manifest.Layers = append(img.manifest.Layers, layer)
	}
	return img
}

func TestArtifactAsVolume(t *testing.T) {
	reg, root := newRegistry(t), filepath.Join(t.TempDir(), "image")
	s := open(t, Config{Root: root})
	model := filesOf(t, "model.bin", "config/params.json", "-untitled")
	img := pull(t, s, model.push(t, reg, "model"))
	if img.Kind != KindArtifact || img.Size == 0 {
		t.Errorf("got an image of the kind %q with %d bytes, want an artifact", img.Kind, img.Size)
	}
	want := map[string]string{
		"model.bin": "model.bin", "config/params.json": "config/params.json", model.manifest.Layers[2].Digest.Encoded(): "-untitled",
	}
	checkFiles := func(dir string) {
		t.Helper()
		for path, name := range want {
			if got := read(t, filepath.Join(dir, path)); got != "content of "+name {
				t.Errorf("%s: got %q", path, got)
			}
		}
	}
	mounts, err := s.View(t.Context(), "c-volume-0", img.ID)
	check(t, err)
	dir := mounted(t, mounts)
	checkFiles(dir)
	if err := os.WriteFile(filepath.Join(dir, "model.bin"), nil, 0o600); err == nil || !strings.Contains(err.Error(), syscall.EROFS.Error()) {
		t.Errorf("writing to the volume: got error %v, want %v", err, syscall.EROFS)
	}
	// A repeated call restores what a crash prevented, also after a restart of the store.
	check(t, os.Remove(filepath.Join(mounts[0].Source, "model.bin")))
	check(t, s.Close())
	s = open(t, Config{Root: root})
	_, err = s.View(t.Context(), "c-volume-0", img.ID)
	check(t, err)
	checkFiles(dir)
	// The files stay while the volume exists, and the collector removes them afterwards.
	check(t, s.Remove(t.Context(), img.ID))
	check(t, s.Collect(t.Context()))
	checkFiles(dir)
	check(t, s.Release(t.Context(), "c-volume-0"))
	_, err = s.Prepare(t.Context(), "c", img.ID, nil)
	wantError(t, err, errdefs.IsNotFound)
}

// Disks and components are volumes, too. No artifact can be a container's root filesystem.
func TestArtifactsOfAllKindsAsVolumes(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	disk, _ := largeDisk(t)
	for name, img := range map[string]*rawImage{"disk": disk, "component": artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasmOf("text")),
		"files": filesOf(t, "a")} {
		got := pull(t, s, img.push(t, reg, name))
		mounts, err := s.View(t.Context(), name, got.ID)
		check(t, err)
		entries, err := os.ReadDir(mounts[0].Source)
		check(t, err)
		if len(entries) != 1 {
			t.Errorf("%s: got %d files, want 1", name, len(entries))
		}
		_, err = s.Prepare(t.Context(), "c", got.ID, nil)
		wantError(t, err, errdefs.IsInvalidArgument, string(got.Kind))
	}
	other := pull(t, s, filesOf(t, "b").push(t, reg, "other"))
	_, err := s.View(t.Context(), "disk", other.ID)
	wantError(t, err, errdefs.IsAlreadyExists)
}

func TestArtifactWithBadTitles(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	for _, names := range [][]string{{"../../etc/passwd"}, {"/etc/passwd"}, {"a/../../b"}, {"."}, {"a\x00b"}, {"same", "same"},
		{"file", "file/below"}} {
		img := pull(t, s, filesOf(t, names...).push(t, reg, "bad"))
		_, err := s.View(t.Context(), "volume", img.ID)
		wantError(t, err, errdefs.IsInvalidArgument)
		check(t, s.Release(t.Context(), "volume"))
	}
	if _, err := os.Stat(filepath.Join(s.cfg.Root, "etc")); err == nil {
		t.Error("a title led out of the volume")
	}
}

// The usage that a kubelet compares with its thresholds counts images of all kinds, by no less than their size.
func TestFsInfoCountsAllKinds(t *testing.T) {
	reg := newRegistry(t)
	disk, _ := largeDisk(t)
	for name, img := range map[string]*rawImage{
		"disk": disk, "component": artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasmOf("text")), "files": filesOf(t, "a"),
		"rootfs": raw(t, tarOf(t, file("a", strings.Repeat("text", 1<<18)))),
	} {
		empty := open(t, Config{})
		before, err := empty.FsInfo(t.Context())
		check(t, err)
		s := open(t, Config{})
		got := pull(t, s, img.push(t, reg, name))
		after, err := s.FsInfo(t.Context())
		check(t, err)
		if got.Size == 0 || after.UsedBytes < before.UsedBytes+got.Size/2 {
			t.Errorf("%s: the image has %d bytes, and the usage is %d, with an empty store %d", name, got.Size, after.UsedBytes, before.UsedBytes)
		}
	}
}
