package protosource_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// tree writes files and returns their directory.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestCompile(t *testing.T) {
	dir := tree(t, map[string]string{
		"api/v1/s.proto": `syntax = "proto3"; package api.v1;
			import "google/protobuf/empty.proto"; import "lib/m.proto";
			service B { rpc M(lib.M) returns (google.protobuf.Empty); }
			// About A.
			service A {}`,
		"third/lib/m.proto": `syntax = "proto3"; package lib; message M {} service Unwanted {}`,
		"flat.proto":        `syntax = "proto3"; service Flat {}`,
	})
	for _, tc := range []struct {
		name            string
		files, paths    []string
		names, services []string
	}{
		{"with import paths", []string{dir + "/api/v1/s.proto"}, []string{dir, dir + "/third"},
			[]string{"google/protobuf/empty.proto", "lib/m.proto", "api/v1/s.proto"}, []string{"api.v1.B", "api.v1.A"}},
		{"without", []string{dir + "/flat.proto"}, nil, []string{"flat.proto"}, []string{"Flat"}},
		{"two files", []string{dir + "/flat.proto", dir + "/third/lib/m.proto"}, []string{dir},
			[]string{"flat.proto", "third/lib/m.proto"}, []string{"Flat", "lib.Unwanted"}},
	} {
		r, err := protosource.Compile(t.Context(), tc.files, tc.paths)
		if err != nil {
			t.Errorf("%s: Compile: %v", tc.name, err)
			continue
		}
		var names []string
		for _, f := range r.Set.File {
			names = append(names, f.GetName())
		}
		if !slices.Equal(names, tc.names) || !slices.Equal(r.Services, tc.services) {
			t.Errorf("%s: files %q, services %q, want %q and %q", tc.name, names, r.Services, tc.names, tc.services)
		}
	}
}

func TestMistakes(t *testing.T) {
	dir := tree(t, map[string]string{
		"syntax.proto": "syntax = \"proto3\";\nmessage {}\n",
		"type.proto":   "syntax = \"proto3\";\nmessage M { Nothing a = 1; Neither b = 2; }\n",
		"import.proto": "syntax = \"proto3\";\nimport \"missing.proto\";\n",
	})
	for _, tc := range []struct {
		file  string
		class error
		want  []string
	}{
		{dir + "/syntax.proto", errdefs.ErrInvalidArgument, []string{"syntax.proto:2:9"}},
		{dir + "/type.proto", errdefs.ErrInvalidArgument, []string{"type.proto:2:13", "Nothing", "Neither"}},
		{dir + "/import.proto", errdefs.ErrNotFound, []string{"import.proto:2:8", "missing.proto"}},
		{dir + "/none.proto", errdefs.ErrNotFound, []string{"none.proto"}},
		{"/elsewhere/x.proto", errdefs.ErrInvalidArgument, []string{"/elsewhere/x.proto is in none of the import paths"}},
	} {
		_, err := protosource.Compile(t.Context(), []string{tc.file}, []string{dir})
		if !errors.Is(err, tc.class) {
			t.Errorf("%s: error %v, want %v", tc.file, err, tc.class)
			continue
		}
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %q does not contain %q", tc.file, err, want)
			}
		}
	}
}
