package qcow2

import (
	"bytes"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
)

// counted counts the bytes read.
type counted struct {
	io.ReaderAt
	bytes int64
}

func (c *counted) ReadAt(p []byte, off int64) (int, error) {
	n, err := c.ReaderAt.ReadAt(p, off)
	c.bytes += int64(n)
	return n, err
}

// TestV5CutOff: Check accepts every complete image and rejects an image truncated anywhere before its last cluster.
// Inspect, which reads only the header, accepts most of these.
func TestV5CutOff(t *testing.T) {
	dir := t.TempDir()
	raw := filepath.Join(dir, "raw")
	check(t, os.WriteFile(raw, testDisk(), 0o600))
	for name, args := range map[string][]string{
		"plain":          nil,
		"version 2":      {"-o", "compat=0.10"},
		"small clusters": {"-o", "cluster_size=512"},
		"large clusters": {"-o", "cluster_size=2M"},
		"extended":       {"-o", "extended_l2=on,cluster_size=64k"},
		"zlib":           {"-c"},
		"zstd":           {"-c", "-o", "compression_type=zstd"},
		"preallocated":   {"-o", "preallocation=metadata"},
		"full":           {"-o", "preallocation=full"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "image")
			qemuImg(t, append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...), raw, path)...)
			image, err := os.ReadFile(path)
			check(t, err)
			info, err := Check(bytes.NewReader(image), int64(len(image)))
			check(t, err)
			inspected := 0
			for i := range 16 {
				size := (len(image) - int(info.ClusterSize)) * i / 15
				if _, err := Check(bytes.NewReader(image[:size]), int64(size)); !errdefs.IsInvalidArgument(err) {
					t.Errorf("Check of %d of %d bytes: got error %v, want invalid argument", size, len(image), err)
				}
				if _, err := Inspect(bytes.NewReader(image[:size]), int64(size)); err == nil {
					inspected++
				}
			}
			if info.ClusterSize < 1<<20 && inspected == 0 {
				t.Error("Inspect alone rejected every size, so the test proves nothing about Check")
			}
		})
	}
}

// TestCheckReadsTablesOnly: Check reads only the tables of a large image, and no more than the image's size if the L1
// table names one L2 table again and again.
func TestCheckReadsTablesOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "large")
	qemuImg(t, "create", "-f", "qcow2", "-o", "preallocation=metadata", path, "64G")
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	st, err := f.Stat()
	check(t, err)
	read := &counted{ReaderAt: f}
	_, err = Check(read, st.Size())
	check(t, err)
	if limit := int64(64<<30/8192 + 2<<20); st.Size() < 64<<30 || read.bytes > limit {
		t.Errorf("Check read %d bytes of an image of %d bytes, want at most %d", read.bytes, st.Size(), limit)
	}

	small := filepath.Join(t.TempDir(), "small")
	check(t, CreateOverlay(t.Context(), small, 1<<40, Overlay{ClusterBits: 16}))
	image, err := os.ReadFile(small)
	check(t, err)
	l1 := binary.BigEndian.Uint64(image[40:])
	table := (uint64(len(image)) + 1<<16 - 1) &^ (1<<16 - 1)
	image = append(image, make([]byte, table+1<<16-uint64(len(image)))...)
	for i := range uint64(2048) {
		binary.BigEndian.PutUint64(image[l1+8*i:], table)
	}
	read = &counted{ReaderAt: bytes.NewReader(image)}
	if _, err := Check(read, int64(len(image))); !errdefs.IsInvalidArgument(err) || read.bytes > 2*int64(len(image)) {
		t.Errorf("Check: got error %v after %d bytes, want invalid argument after at most %d", err, read.bytes, 2*len(image))
	}
}

// FuzzCheck: with any tables, Check ends and reads at most twice the image's size. All clusters of an accepted image
// can be read.
func FuzzCheck(f *testing.F) {
	path := filepath.Join(f.TempDir(), "image")
	check(f, CreateOverlay(f.Context(), path, 1<<20, Overlay{ClusterBits: 12}))
	image, err := os.ReadFile(path)
	check(f, err)
	f.Add(image)
	l1 := binary.BigEndian.Uint64(image[40:])
	full := append(slices.Clone(image), make([]byte, 3<<12)...)
	table := uint64(len(full)-2<<12) &^ 0xfff
	binary.BigEndian.PutUint64(full[l1:], table|1<<63)
	binary.BigEndian.PutUint64(full[table:], (table+1<<12)|1<<63)
	f.Add(full)
	f.Add(full[:len(full)-1<<12])
	f.Fuzz(func(t *testing.T, image []byte) {
		read := &counted{ReaderAt: bytes.NewReader(image)}
		if _, err := Check(read, int64(len(image))); err != nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Fatalf("Check returned an error of the wrong class: %v", err)
			}
			return
		}
		if read.bytes > 2*int64(len(image))+1<<12 {
			t.Fatalf("Check read %d bytes of an image of %d bytes", read.bytes, len(image))
		}
		q, err := NewReader(bytes.NewReader(image), int64(len(image)))
		if err != nil {
			t.Fatal(err)
		}
		defer q.Close()
		buf := make([]byte, q.Info().ClusterSize)
		for n := range min((q.Info().VirtualSize-1)/q.Info().ClusterSize+1, 64) {
			if entry, _, err := q.entry(n); err == nil && entry&entryCompressed != 0 {
				continue // what is packed may be anything
			}
			if _, err := q.ReadCluster(n, buf); err != nil {
				t.Fatalf("ReadCluster(%d) of a checked image: %v", n, err)
			}
		}
	})
}
