package qcow2

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
)

// readAll reads the disk of an image with a Reader.
func readAll(t testing.TB, image []byte) ([]byte, error) {
	t.Helper()
	q, err := NewReader(bytes.NewReader(image), int64(len(image)))
	if err != nil {
		return nil, err
	}
	defer q.Close()
	info := q.Info()
	buf := make([]byte, info.ClusterSize)
	var disk []byte
	for n := range (info.VirtualSize-1)/info.ClusterSize + 1 {
		zero, err := q.ReadCluster(n, buf)
		if err != nil {
			return nil, err
		}
		if zero && bytes.Trim(buf, "\x00") != nil {
			t.Fatalf("ReadCluster(%d) reported zero for a cluster with data", n)
		}
		disk = append(disk, buf...)
	}
	return disk[:info.VirtualSize], nil
}

// testDisk has random clusters, compressible ones and holes, and ends within a cluster.
func testDisk() []byte {
	disk := make([]byte, 5<<20+512)
	random := rand.NewChaCha8([32]byte{1})
	for i := 0; i < 20; i++ {
		at := i * 256 << 10
		switch i % 3 {
		case 0:
			_, _ = random.Read(disk[at : at+100<<10])
		case 1:
			copy(disk[at:], bytes.Repeat([]byte("the same again; "), 4<<10))
		}
	}
	copy(disk[len(disk)-512:], "the end")
	return disk
}

// TestReader: a Reader returns the original disk from every kind of image that QEMU makes and Inspect accepts.
func TestReader(t *testing.T) {
	dir := t.TempDir()
	raw := filepath.Join(dir, "raw")
	want := testDisk()
	check(t, os.WriteFile(raw, want, 0o600))
	for name, args := range map[string][]string{
		"plain":             nil,
		"version 2":         {"-o", "compat=0.10"},
		"small clusters":    {"-o", "cluster_size=512"},
		"large clusters":    {"-o", "cluster_size=2M"},
		"extended":          {"-o", "extended_l2=on,cluster_size=64k"},
		"zlib":              {"-c"},
		"zlib, small":       {"-c", "-o", "cluster_size=4k"},
		"zstd":              {"-c", "-o", "compression_type=zstd"},
		"zstd, large":       {"-c", "-o", "compression_type=zstd,cluster_size=2M"},
		"zlib and extended": {"-c", "-o", "extended_l2=on,cluster_size=64k"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "image")
			qemuImg(t, append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...), raw, path)...)
			image, err := os.ReadFile(path)
			check(t, err)
			got, err := readAll(t, image)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("got %d bytes, %v; want the disk's %d bytes", len(got), err, len(want))
			}
			q, err := NewReader(bytes.NewReader(image), int64(len(image)))
			check(t, err)
			defer q.Close()
			part := make([]byte, 20<<10+1) // over a cluster's end, and from within one
			if n, err := q.ReadAt(part, 250<<10+1); n != len(part) || err != nil || !bytes.Equal(part, want[250<<10+1:][:len(part)]) {
				t.Errorf("ReadAt within a cluster = %d, %v; want %d bytes of the disk", n, err, len(part))
			}
			tail := make([]byte, 600)
			if n, err := q.ReadAt(tail, int64(len(want)-500)); n != 500 || err != io.EOF || !bytes.Equal(tail[:n], want[len(want)-500:]) {
				t.Errorf("ReadAt at the end = %d, %v; want 500 bytes and io.EOF", n, err)
			}
		})
	}
}

// TestReaderZero: a new image, zero clusters and zero subclusters read as zero.
func TestReaderZero(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	check(t, CreateOverlay(t.Context(), path, 1<<20, Overlay{}))
	image, err := os.ReadFile(path)
	check(t, err)
	got, err := readAll(t, image)
	if err != nil || !bytes.Equal(got, make([]byte, 1<<20)) {
		t.Errorf("empty image: got %d bytes, %v; want 1 MiB of zeros", len(got), err)
	}
}

// TestReaderCutOff: reading a truncated image fails without a panic.
func TestReaderCutOff(t *testing.T) {
	dir := t.TempDir()
	raw, path := filepath.Join(dir, "raw"), filepath.Join(dir, "image")
	check(t, os.WriteFile(raw, testDisk(), 0o600))
	qemuImg(t, "convert", "-c", "-f", "raw", "-O", "qcow2", raw, path)
	image, err := os.ReadFile(path)
	check(t, err)
	for _, size := range []int{0, 100, 512, 70 << 10, len(image) / 2, len(image) - 1024} {
		if _, err := readAll(t, image[:size]); !errdefs.IsInvalidArgument(err) {
			t.Errorf("reading %d of %d bytes: got error %v, want invalid argument", size, len(image), err)
		}
	}
}

// FuzzReader: with any tables, reading ends with an error or a disk.
func FuzzReader(f *testing.F) {
	path := filepath.Join(f.TempDir(), "image")
	check(f, CreateOverlay(f.Context(), path, 1<<20, Overlay{ClusterBits: 12}))
	image, err := os.ReadFile(path)
	check(f, err)
	f.Add(image)
	f.Fuzz(func(t *testing.T, image []byte) {
		q, err := NewReader(bytes.NewReader(image), int64(len(image)))
		if err != nil {
			return
		}
		defer q.Close()
		buf := make([]byte, q.Info().ClusterSize)
		for n := range min((q.Info().VirtualSize-1)/q.Info().ClusterSize+1, 64) {
			if _, err := q.ReadCluster(n, buf); err != nil {
				return
			}
		}
	})
}
