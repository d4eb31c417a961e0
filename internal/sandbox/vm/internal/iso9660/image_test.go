package iso9660

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	reader "github.com/kdomanski/iso9660"
)

// sample returns files like those of real images and edge cases: an empty file, a file of several sectors, and many
// files whose names are equal in the primary tree. With 12 or more of them, their directory has more than one sector.
func sample(many int) []File {
	files := []File{
		{Path: "meta-data", Data: []byte("m\n")},
		{Path: "user-data", Data: []byte("u\n"), Mode: 0o600},
		{Path: "network-config"},
		{Path: "tripod-agent", Data: bytes.Repeat([]byte("0123456789"), 1000), Mode: 0o555},
		{Path: "openstack/latest/meta_data.json", Data: []byte("{}")},
		{Path: "openstack/content/0000", Data: []byte("c")},
	}
	for i := range many {
		files = append(files, File{Path: fmt.Sprintf("many/a-name-that-is-too-long-for-the-primary-tree-%02d.conf", i), Data: fmt.Append(nil, i)})
	}
	return files
}

// TestRockRidge reads an image with another implementation. It loses names in directories of more than one sector,
// because it keeps slices of a buffer that it reuses.
func TestRockRidge(t *testing.T) {
	files := sample(8)
	image, err := Build("cidata", files)
	if err != nil {
		t.Fatal(err)
	}
	r, err := reader.OpenImage(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	if label, err := r.Label(); err != nil || label != "cidata" {
		t.Errorf("Label = %q, %v; want cidata", label, err)
	}
	root, err := r.RootDir()
	if err != nil {
		t.Fatal(err)
	}
	type content struct {
		data string
		mode os.FileMode
	}
	got := map[string]content{}
	var walk func(dir *reader.File, at string)
	walk = func(dir *reader.File, at string) {
		children, err := dir.GetChildren()
		if err != nil {
			t.Fatalf("read directory %q: %v", at, err)
		}
		for _, c := range children {
			name := path.Join(at, c.Name())
			if c.IsDir() {
				walk(c, name)
				continue
			}
			data, err := io.ReadAll(c.Reader())
			if err != nil {
				t.Errorf("read file %s: %v", name, err)
			}
			got[name] = content{string(data), c.Mode().Perm()}
		}
	}
	walk(root, "")
	if len(got) != len(files) {
		t.Errorf("the image has %d files, want %d: %v", len(got), len(files), slices.Sorted(maps.Keys(got)))
	}
	for _, f := range files {
		mode := f.Mode
		if mode == 0 {
			mode = 0o644
		}
		if g := got[f.Path]; g.data != string(f.Data) || g.mode != mode {
			t.Errorf("%s: got %d bytes with mode %v, want %d bytes with mode %v, or the content differs", f.Path, len(g.data), g.mode, len(f.Data),
				mode)
		}
	}
}

// TestJoliet walks the Joliet tree, which the other implementation does not support.
func TestJoliet(t *testing.T) {
	files := sample(40)
	image, err := Build("config-2", files)
	if err != nil {
		t.Fatal(err)
	}
	descriptor := image[17*sectorSize : 18*sectorSize]
	if descriptor[0] != 2 || string(descriptor[88:91]) != "%/E" || plain(descriptor[40:72]) != "config-2        " {
		t.Fatalf("descriptor has type %d, escape %q, label %q; want 2, %%/E, config-2", descriptor[0], descriptor[88:91],
			plain(descriptor[40:72]))
	}
	got := map[string]string{}
	var walk func(record []byte, at string)
	walk = func(record []byte, at string) {
		extent, size := binary.LittleEndian.Uint32(record[2:]), binary.LittleEndian.Uint32(record[10:])
		content := image[extent*sectorSize:][:size]
		if record[25]&2 == 0 {
			got[at] = string(content)
			return
		}
		for i := 0; len(content) > 0; i++ {
			length := int(content[0])
			if length == 0 { // the rest of a sector
				content = content[min(len(content), int(uint32(len(content))-1)%sectorSize+1):]
				continue
			}
			if i > 1 { // the first two are the directory itself and its parent
				walk(content[:length], path.Join(at, plain(content[33:33+int(content[32])])))
			}
			content = content[length:]
		}
	}
	walk(descriptor[156:190], "")
	for _, f := range files {
		if data, ok := got[f.Path]; !ok || data != string(f.Data) {
			t.Errorf("%s: got %d bytes (found: %t), want %d bytes, or the content differs", f.Path, len(data), ok, len(f.Data))
		}
	}
}

func plain(ucs2 []byte) string {
	var b strings.Builder
	for i := 1; i < len(ucs2); i += 2 {
		b.WriteByte(ucs2[i])
	}
	return b.String()
}

// TestReproducible checks the digest of the sample's image, with its files in any order. bsdtar 3.6.2, xorriso 1.5.4
// and blkid 2.38 read that image correctly.
func TestReproducible(t *testing.T) {
	const want = "25230c37119643880ce30f59d7c6a048df594a665f70f8bb1018892b9b700ea7"
	forth, back := sample(40), sample(40)
	for i, f := range forth {
		back[len(back)-1-i] = f
	}
	for name, files := range map[string][]File{"as given": forth, "reversed": back} {
		image, err := Build("cidata", files)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(image)
		if got := hex.EncodeToString(sum[:]); got != want {
			t.Errorf("%s: digest = %s, want %s", name, got, want)
		}
	}
}

func TestBadInput(t *testing.T) {
	for _, c := range []struct {
		label, path string
	}{
		{"", "a"},
		{"seventeen-letters", "a"},
		{"new\nline", "a"},
		{"x", ""},
		{"x", "/a"},
		{"x", "../a"},
		{"x", ".."},
		{"x", "a//b"},
		{"x", "a/../b"},
		{"x", "a b"},
		{"x", "ä"},
		{"x", strings.Repeat("a", 65)},
		{"x", strings.Repeat("a/", 8) + "b"},
	} {
		if _, err := Build(c.label, []File{{Path: c.path}}); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Build with label %q, path %q: error = %v, want ErrInvalidArgument", c.label, c.path, err)
		}
	}
	for _, twice := range [][]File{{{Path: "a"}, {Path: "a"}}, {{Path: "a"}, {Path: "a/b"}}, {{Path: "a/b"}, {Path: "a"}}} {
		if _, err := Build("x", twice); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Build(%v) error = %v, want ErrInvalidArgument", twice, err)
		}
	}
	huge := make([]byte, MaxSize/2+1)
	if _, err := Build("x", []File{{Path: "a", Data: huge}, {Path: "b", Data: huge}}); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("Build of too much data: error = %v, want ErrInvalidArgument", err)
	}
}

func BenchmarkBuild(b *testing.B) {
	files := sample(40)
	for b.Loop() {
		if _, err := Build("cidata", files); err != nil {
			b.Fatal(err)
		}
	}
}
