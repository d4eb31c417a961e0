package main

import (
	"archive/tar"
	"bytes"
	"io"
	"maps"
	"path"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// tree is a file system layer that is being built. The keys are paths without a leading slash.
type tree map[string]*entry

// entry is a file, directory (typ tar.TypeDir) or link (tar.TypeLink, tar.TypeSymlink).
type entry struct {
	typ  byte
	mode int64
	uid  int
	gid  int
	data []byte
	link string
}

// dir adds directories.
func (t tree) dir(mode int64, names ...string) {
	for _, n := range names {
		t.add(n, &entry{typ: tar.TypeDir, mode: mode})
	}
}

func (t tree) file(name string, mode int64, data []byte) {
	t.add(name, &entry{typ: tar.TypeReg, mode: mode, data: data})
}

func (t tree) text(name, data string) { t.file(name, 0o644, []byte(data)) }

// hardlink adds another name for target, which is a path in this tree.
func (t tree) hardlink(name, target string) {
	t.add(name, &entry{typ: tar.TypeLink, mode: 0o755, link: target})
}

func (t tree) symlink(name, target string) {
	t.add(name, &entry{typ: tar.TypeSymlink, mode: 0o777, link: target})
}

// add adds an entry and its parent directories.
func (t tree) add(name string, e *entry) {
	t[name] = e
	for d := path.Dir(name); d != "."; d = path.Dir(d) {
		if t[d] == nil {
			t[d] = &entry{typ: tar.TypeDir, mode: 0o755}
		}
	}
}

// layer packs the tree, sorted and without dates, so that the digest depends only on the content. Hard links come last,
// because a hard link must come after its target.
func (t tree) layer() (v1.Layer, error) {
	names := slices.SortedFunc(maps.Keys(t), func(a, b string) int {
		if la, lb := t[a].typ == tar.TypeLink, t[b].typ == tar.TypeLink; la != lb {
			if lb {
				return -1
			}
			return 1
		}
		return bytes.Compare([]byte(a), []byte(b))
	})
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, name := range names {
		e := t[name]
		h := &tar.Header{Typeflag: e.typ, Name: name, Mode: e.mode, Uid: e.uid, Gid: e.gid, Size: int64(len(e.data)), Linkname: e.link}
		if e.typ == tar.TypeDir {
			h.Name += "/"
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
}
