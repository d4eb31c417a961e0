package artifact

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/image"
)

func TestImportFile(t *testing.T) {
	r := newRig(t)
	wasm := example(t, "hello-http-c")
	ids := map[string]bool{}
	for _, name := range []string{"a.wasm", "b.wasm"} {
		path := filepath.Join(t.TempDir(), name)
		r.must(os.WriteFile(path, wasm, 0o644))
		f, err := os.Open(path)
		r.must(err)
		defer f.Close()
		img, err := ImportFile(t.Context(), r.store, f)
		r.must(err)
		ids[img.ID] = true
		want := image.LocalPrefix + digest.FromBytes(wasm).Encoded() + ":latest"
		if len(img.RepoTags) != 1 || img.RepoTags[0] != want || !image.IsLocal(img.RepoTags[0]) {
			t.Errorf("RepoTags = %v, want %s", img.RepoTags, want)
		}
		if a, err := Open(t.Context(), r.store, img.ID); err != nil || a.Wasm.Digest != digest.FromBytes(wasm) {
			t.Errorf("Open of the imported image = %+v, %v", a, err)
		}
	}
	img, err := Import(t.Context(), r.store, bytes.NewReader(wasm))
	r.must(err)
	ids[img.ID] = true
	if len(img.RepoDigests) != 1 || !strings.HasPrefix(img.RepoDigests[0], image.LocalPrefix+digest.FromBytes(wasm).Encoded()+"@sha256:") {
		t.Errorf("RepoDigests = %v, want one with the binary's SHA-256 as name", img.RepoDigests)
	}
	if len(ids) != 1 {
		t.Errorf("images = %v, want one for both files and the reader", ids)
	}
}

func TestImportFileRefuses(t *testing.T) {
	r := newRig(t)
	if _, err := Import(t.Context(), r.store, strings.NewReader("#!/bin/sh")); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Import of a script = %v, want ErrInvalidArgument", err)
	}
	text := filepath.Join(t.TempDir(), "text.wasm")
	r.must(os.WriteFile(text, []byte("#!/bin/sh"), 0o644))
	for _, path := range []string{text, t.TempDir(), "/dev/null"} {
		f, err := os.Open(path)
		r.must(err)
		defer f.Close()
		if _, err := ImportFile(t.Context(), r.store, f); !errdefs.IsInvalidArgument(err) {
			t.Errorf("ImportFile(%s) = %v, want ErrInvalidArgument", path, err)
		}
	}
}
