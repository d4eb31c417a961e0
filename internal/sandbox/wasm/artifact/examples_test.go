package artifact

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/image"
)

// examples is the directory of the example guests.
const examples = "../../../../examples/wasm"

func manifestOf(t testing.TB, config image.Blob, layers ...image.Blob) image.Blob {
	t.Helper()
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Config: config.Descriptor}
	for _, layer := range layers {
		m.Layers = append(m.Layers, layer.Descriptor)
	}
	document, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return image.NewBlob(m.MediaType, document)
}

// TestExamplesAreBuiltFromTheirSources checks SHA256SUMS, which build.sh writes with the digests of all sources and of
// the binaries built from them.
func TestExamplesAreBuiltFromTheirSources(t *testing.T) {
	for _, dir := range []string{examples, "../../../../examples/edge"} {
		t.Run(filepath.Base(dir), func(t *testing.T) { builtFromSources(t, dir) })
	}
}

func builtFromSources(t *testing.T, dir string) {
	text, err := os.ReadFile(filepath.Join(dir, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]string{}
	for line := range strings.Lines(string(text)) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		listed[name] = sum
	}
	err = fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if name == "greeter-python" { // it has no binary here
			return fs.SkipDir
		}
		if err != nil || d.IsDir() || name == "SHA256SUMS" || filepath.Ext(name) == ".md" {
			return err
		}
		data, err := os.ReadFile(filepath.Join(dir, name))
		if sum := fmt.Sprintf("%x", sha256.Sum256(data)); listed[name] != sum {
			t.Errorf("SHA-256 of %s = %s, but SHA256SUMS has %q; run `make examples` and commit the result", name, sum, listed[name])
		}
		delete(listed, name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range listed {
		t.Errorf("%s is in SHA256SUMS, but does not exist", name)
	}
}

func TestExamplesCanBePushed(t *testing.T) {
	for name, want := range map[string]struct {
		world    wit.World
		services []string
	}{
		"echo-c":       {wit.WorldGRPC, []string{"proto:echo-v1/echo"}},
		"greeter-c":    {wit.WorldGRPC, []string{"proto:greet-v1/greeter"}},
		"greeter-js":   {wit.WorldGRPC, []string{"proto:greet-v1/greeter"}},
		"faults-c":     {wit.WorldGRPC, []string{"proto:faults-v1/faults"}},
		"hello-http-c": {wit.WorldHTTP, nil},
		"command-go":   {wit.WorldCommand, nil},
		"raw-c":        {wit.WorldRaw, nil},
	} {
		data := example(t, name)
		o, err := wasmbin.Read(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			t.Errorf("Read of %s = %v", name, err)
			continue
		}
		if world, err := Check(o, want.services); world != want.world || err != nil {
			t.Errorf("Check of %s = %q, %v; want %q", name, world, err, want.world)
		}
	}
}
