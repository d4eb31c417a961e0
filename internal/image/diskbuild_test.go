package image

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/registry"
)

// TestBuildDisk: a machine gets the pushed disk after a pull.
func TestBuildDisk(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	q := qcow2Of(t, 5<<20)
	for name, data := range map[string][]byte{"disk": q, "a.img.xz": compressXz(t, q), "a.qcow2.zst": compressZstd(t, q)} {
		file := filepath.Join(t.TempDir(), name)
		check(t, os.WriteFile(file, data, 0o600))
		if is, err := disk.IsFile(file); err != nil || !is {
			t.Errorf("disk.IsFile(%s) = %v, %v; want true", name, is, err)
		}
		manifest, blobs, err := BuildDisk(file, map[string]string{"note": name})
		check(t, err)
		ref := reg.ref("disks/" + name + ":1")
		_, err = Push(t.Context(), registry.Config{}, ref, nil, nil, manifest, blobs...)
		check(t, err)
		img := pull(t, s, ref)
		f, text := openAndRead(t, s, name, img.ID)
		if img.ID != manifest.Digest.String() || f.Layout != disk.LayoutDiskArtifact || f.Format != disk.FormatQcow2 || text != string(q) ||
			img.Annotations["note"] != name {
			t.Errorf("%s: got image %+v with disk %+v, want the pushed qcow2 disk", name, img, f)
		}
	}
	if is, err := disk.IsFile(saveFile(t, "installer.iso", make([]byte, 64<<10))); err != nil || !is {
		t.Errorf("disk.IsFile of a CD-ROM image = %v, %v; want true", is, err)
	}
	for name, data := range map[string][]byte{"app.wasm": wasmOf("x"), "app.img": wasmOf("x"), "README": []byte("text")} {
		file := filepath.Join(t.TempDir(), name)
		check(t, os.WriteFile(file, data, 0o600))
		if is, err := disk.IsFile(file); err != nil || is {
			t.Errorf("disk.IsFile(%s) = %v, %v; want false", name, is, err)
		}
	}
	file := filepath.Join(t.TempDir(), "bad.qcow2")
	check(t, os.WriteFile(file, qcow2WithBackingFile(t), 0o600))
	_, _, err := BuildDisk(file, nil)
	wantError(t, err, errdefs.IsInvalidArgument, file, "backing file")
}

// TestUnpackedDiskIsSparse: the zeros of a raw disk take no space on disk.
func TestUnpackedDiskIsSparse(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	const holeSize = 64 << 10
	content := make([]byte, 16<<20)
	copy(content[holeSize-10:], "in the first block and the second")
	copy(content[8<<20:], randomBytes(t, 100_000))
	content[len(content)-1] = 1
	content = append(content, make([]byte, 1000)...)
	img := pull(t, s, diskArtifact(disk.MediaTypeRaw+"+gzip", compressGzip(t, content)).push(t, reg, "sparse"))
	f, text := openAndRead(t, s, "c", img.ID)
	if text != string(content) {
		t.Error("the disk's content differs from the original")
	}
	var stat unix.Stat_t
	check(t, unix.Fstat(int(f.Disk.Fd()), &stat))
	if taken := stat.Blocks * 512; taken > 8*holeSize {
		t.Errorf("a disk of %d bytes takes %d bytes on the file system, want at most %d", len(content), taken, 8*holeSize)
	}
}

// TestArtifactsOfOneLayer: artifacts with the same compressed disk are pulled at the same time.
func TestArtifactsOfOneLayer(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	q := qcow2Of(t, 5<<20)
	packed := compressGzip(t, q)
	var wg sync.WaitGroup
	for i := range 5 {
		m := diskArtifact(disk.MediaTypeQcow2+"+gzip", packed)
		m.manifest.Annotations = map[string]string{"n": fmt.Sprint(i)}
		ref := m.push(t, reg, fmt.Sprintf("a%d", i))
		wg.Go(func() {
			if _, err := s.Pull(t.Context(), ref, PullOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	all, err := s.List(t.Context())
	check(t, err)
	for i, img := range all {
		key := fmt.Sprint(i)
		if _, text := openAndRead(t, s, key, img.ID); text != string(q) {
			t.Error("the disk's content differs from the original")
		}
		check(t, s.CloseDisk(t.Context(), key))
		check(t, s.Remove(t.Context(), img.ID))
	}
	if len(all) != 5 {
		t.Errorf("List() = %d images, want 5", len(all))
	}
	wantEmpty(t, s)
}
