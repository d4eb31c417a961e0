package engine

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// TestCrate: build/engine is the library of this checkout's crate, and has the features that it names, no others: what is
// not built in, no guest can reach.
func TestCrate(t *testing.T) {
	header := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("../../../build/engine/include", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	version := regexp.MustCompile(`#define WASMTIME_VERSION "(.*)"`).FindSubmatch(header("wasmtime.h"))
	if version == nil || string(version[1]) != wasmtimeVersion() {
		t.Errorf("build/engine has wasmtime %s, the crate %s: run `make engine`", version, wasmtimeVersion())
	}
	var features []string
	for _, m := range regexp.MustCompile(`(?m)^#define WASMTIME_FEATURE_(\w+)`).FindAllSubmatch(header("wasmtime/conf.h"), -1) {
		if f := string(m[1]); f != "COMPILER" { // which follows from CRANELIFT
			features = append(features, f)
		}
	}
	slices.Sort(features)
	want := []string{"ADDR2LINE", "ASYNC", "COMPONENT_MODEL", "CRANELIFT", "DEMANGLE", "DISABLE_LOGGING", "PARALLEL_COMPILATION",
		"POOLING_ALLOCATOR", "WASI", "WINCH"}
	if !slices.Equal(features, want) {
		t.Errorf("features of build/engine: %v, want %v", features, want)
	}
}
