package scaffold

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// newBound returns a project of .proto files.
func newBound(t *testing.T, l *boundLanguage, protos ...string) *boundProject {
	t.Helper()
	source, err := protosource.Compile(t.Context(), protos, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, err := l.newProject(source, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestBindgen: the tool is built once, and appears whole or not at all.
func TestBindgen(t *testing.T) {
	path, cache := t.TempDir(), t.TempDir()
	t.Setenv("PATH", path+":/bin:/usr/bin")
	t.Setenv("XDG_CACHE_HOME", cache)
	cargo := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(path, "cargo"), []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cargo("mkdir root; exit 1\n")
	if _, err := findBindgen(t.Context(), io.Discard); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a failing cargo: got error %v", err)
	}
	cargo("test -f source/Cargo.lock && mkdir -p root/bin && echo 'echo built' >root/bin/tripod-bindgen && chmod 755 root/bin/tripod-bindgen\n")
	for _, want := range []string{"building wit-bindgen, once", ""} {
		var progress strings.Builder
		tool, err := findBindgen(t.Context(), &progress)
		if err != nil {
			t.Fatal(err)
		}
		if got := progress.String(); !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("progress: got %q, want %q", got, want)
		}
		if got := read(t, tool.Name()); got != "echo built\n" {
			t.Errorf("the tool: got %q", got)
		}
	}
	if left, err := os.ReadDir(filepath.Join(cache, "tripod", "tools")); err != nil || len(left) != 1 {
		t.Errorf("left in the cache: %v, error %v", left, err)
	}
}
