package protowit_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// compile makes the schema of a file in testdata.
func compile(t testing.TB, file string) *protowit.Schema {
	t.Helper()
	source, err := protosource.Compile(t.Context(), []string{filepath.Join("testdata", file)}, []string{"testdata"})
	if err != nil {
		t.Fatal(err)
	}
	s, err := protowit.Compile(source.Set, source.Services...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestWIT compares the text for every .proto in testdata with a golden file.
func TestWIT(t *testing.T) {
	files, err := filepath.Glob("testdata/*.proto")
	if err != nil || len(files) == 0 {
		t.Fatalf("no .proto files in testdata (%v)", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			got := compile(t, filepath.Base(file)).Document()
			golden := file[:len(file)-len(".proto")] + ".wit"
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("the text differs from %s (go test -update rewrites it):\n%s", golden, got)
			}
		})
	}
}
