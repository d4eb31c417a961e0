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

// sample has what images of ours have, and what is at the edges: an empty file, one of several sectors, names that are the
// same once shortened, as many as asked for: from 12 on the directory has more than one sector.
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

// The other reader loses names in directories of more than one sector: it keeps slices of a buffer that it reuses.
func TestAnotherReaderSeesWhatWasWritten(t *testing.T) {
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
		t.Errorf("label %q, %v", label, err)
	}
	root, err := r.RootDir()
	if err != nil {
		t.Fatal(err)
	}
	type seen struct {
		data string
		mode os.FileMode
	}
	got := map[string]seen{}
	var walk func(dir *reader.File, at string)
	walk = func(dir *reader.File, at string) {
		children, err := dir.GetChildren()
		if err != nil {
			t.Fatalf("%q: %v", at, err)
		}
		for _, c := range children {
			name := path.Join(at, c.Name())
			if c.IsDir() {
				walk(c, name)
				continue
			}
			data, err := io.ReadAll(c.Reader())
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			got[name] = seen{string(data), c.Mode().Perm()}
		}
	}
	walk(root, "")
	if len(got) != len(files) {
		t.Errorf("%d files were seen, not %d: %v", len(got), len(files), slices.Sorted(maps.Keys(got)))
	}
	for _, f := range files {
		mode := f.Mode
		if mode == 0 {
			mode = 0o644
		}
		if g := got[f.Path]; g.data != string(f.Data) || g.mode != mode {
			t.Errorf("%s: %d bytes with mode %v were seen", f.Path, len(g.data), g.mode)
		}
	}
}

// TestJoliet walks the second tree, which the other reader does not know.
func TestJoliet(t *testing.T) {
	files := sample(40)
	image, err := Build("config-2", files)
	if err != nil {
		t.Fatal(err)
	}
	descriptor := image[17*sectorSize : 18*sectorSize]
	if descriptor[0] != 2 || string(descriptor[88:91]) != "%/E" || plain(descriptor[40:72]) != "config-2        " {
		t.Fatalf("descriptor of type %d, escape %q, label %q", descriptor[0], descriptor[88:91], plain(descriptor[40:72]))
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
			if i > 1 { // not itself, not its parent
				walk(content[:length], path.Join(at, plain(content[33:33+int(content[32])])))
			}
			content = content[length:]
		}
	}
	walk(descriptor[156:190], "")
	for _, f := range files {
		if data, ok := got[f.Path]; !ok || data != string(f.Data) {
			t.Errorf("%s: %d bytes were seen", f.Path, len(data))
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

// TestImagesAreTheSame holds the bytes: of the sample, whatever the order of its files. It was read with bsdtar 3.6.2 (all
// three trees), xorriso 1.5.4 and blkid 2.38 before its digest was noted here.
func TestImagesAreTheSame(t *testing.T) {
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
			t.Errorf("%s: the image's digest is %s", name, got)
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
			t.Errorf("label %q, path %q: %v", c.label, c.path, err)
		}
	}
	for _, twice := range [][]File{{{Path: "a"}, {Path: "a"}}, {{Path: "a"}, {Path: "a/b"}}, {{Path: "a/b"}, {Path: "a"}}} {
		if _, err := Build("x", twice); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%v: %v", twice, err)
		}
	}
	huge := make([]byte, MaxSize/2+1)
	if _, err := Build("x", []File{{Path: "a", Data: huge}, {Path: "b", Data: huge}}); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("an image that is too large: %v", err)
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
