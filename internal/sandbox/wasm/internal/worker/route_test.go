package worker

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

// twoMemories returns a component of two core instances, each with a memory and an exported function, which takes the
// component path.
func twoMemories() []byte {
	section := func(id byte, body string) string { return string([]byte{id, byte(len(body))}) + body }
	module := wasmbin.ModuleHeader + section(1, "\x01\x60\x00\x00") + section(3, "\x01\x00") + section(5, "\x01\x00\x01") +
		section(7, "\x01\x01f\x00\x00") + section(10, "\x01\x02\x00\x0b")
	return []byte(wasmbin.ComponentHeader + section(1, module) + section(2, "\x02"+strings.Repeat("\x00\x00\x00", 2)) +
		section(6, "\x02\x00\x00\x01\x00\x01f\x00\x00\x01\x01\x01f") + section(7, "\x01\x40\x00\x01\x00") +
		section(8, "\x02\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00") + section(11, "\x02\x00\x01f\x01\x00\x00\x00\x01g\x01\x01\x00"))
}

// TestRouteIsTheEngines compares what `tripod push` and `tripod check` say about a guest, without an engine, with what the
// engine does once it has compiled the guest: for the examples and the guests of tests, in all worlds and on both paths.
func TestRouteIsTheEngines(t *testing.T) {
	guests := map[string][]byte{"two memories": twoMemories()}
	for _, pattern := range []string{examples + "*/*.wasm", "testdata/*.wasm", "../../program/testdata/*/*.wasm",
		"../../../../component/engine/testdata/*.wasm"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			guests[file], err = os.ReadFile(file)
			require.NoError(t, err)
		}
	}
	e, err := engine.New(engine.Config{Instances: 4})
	require.NoError(t, err)
	seen := make(map[string]int)
	for name, binary := range guests {
		image, err := e.Compile(t.Context(), binary, CompileOptions())
		if err != nil {
			require.ErrorContains(t, err, "nothing provides it", name) // for the tests of the engine
			continue
		}
		want, err := engine.Inspect(image)
		require.NoError(t, err, name)
		outline, err := wasmbin.Read(bytes.NewReader(binary), int64(len(binary)))
		require.NoError(t, err, name)
		route, err := artifact.RouteOf(binary, outline, want.World)
		require.NoError(t, err, name)
		require.Equal(t, want.Path.String(), route.Path, name)
		require.Equal(t, want.WhyComponent, route.PathReason, name)
		if want.World != wit.WorldCommand {
			require.Equal(t, want.WhyNoSnapshot, route.SnapshotReason, name)
			require.Equal(t, want.WhyNoSnapshot == "", route.Snapshot, name)
		}
		seen[route.Path]++
		if route.Snapshot {
			seen["snapshot"]++
		}
		require.Equal(t, route.Path == artifact.PathComponent, strings.Contains(route.String(), "worker of its own"), route)
	}
	require.Positive(t, seen[artifact.PathCore])
	require.Positive(t, seen[artifact.PathComponent])
	require.Positive(t, seen["snapshot"])
}
