package artifact

import (
	"encoding/json"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/image"
	imageregistry "github.com/tripod-run/tripod/internal/image/registry"
	"github.com/tripod-run/tripod/internal/keys"
)

// rig has a registry and an image store.
type rig struct {
	*testing.T
	host  string
	store *image.Store
}

func newRig(t *testing.T) *rig {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	store, err := image.Open(t.Context(), image.Config{Root: filepath.Join(t.TempDir(), "image")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return &rig{t, strings.TrimPrefix(server.URL, "http://"), store}
}

// pull pushes an artifact, pulls it and opens it.
func (r *rig) pull(name string, manifest image.Blob, blobs ...image.Blob) *Artifact {
	r.Helper()
	_, err := image.Push(r.Context(), imageregistry.Config{}, r.host+"/"+name, nil, nil, manifest, blobs...)
	r.must(err)
	img, err := r.store.Pull(r.Context(), r.host+"/"+name, image.PullOptions{})
	r.must(err)
	a, err := Open(r.Context(), r.store, img.ID)
	r.must(err)
	return a
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func example(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(examples, name, name+".wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestBuiltArtifactOpens(t *testing.T) {
	r := newRig(t)
	wasm, set := example(t, "greeter-c"), []byte("a descriptor set")
	notes := map[string]string{"vimana.host/domain": "example.com", keys.Services: "a.A,b.B"}
	built, err := Build(Spec{Wasm: wasm, Descriptors: set, Annotations: notes})
	r.must(err)
	again, err := Build(Spec{Wasm: wasm, Descriptors: set, Annotations: notes})
	r.must(err)
	if built.Manifest.Digest != again.Manifest.Digest {
		t.Error("Build of the same files made two different artifacts")
	}
	a := r.pull("greeter:1", built.Manifest, built.Blobs...)
	if a.Layout != image.LayoutCNCF || a.ImageID != built.Manifest.Digest.String() || a.Wasm.Size != int64(len(wasm)) ||
		a.Annotations["vimana.host/domain"] != "example.com" || !slices.Equal(a.Services, []string{"a.A", "b.B"}) {
		t.Errorf("opened artifact = %+v", a)
	}
	f, err := a.OpenWasm(t.Context(), r.store)
	r.must(err)
	defer f.Close()
	if got, _ := io.ReadAll(f); string(got) != string(wasm) {
		t.Error("OpenWasm returned another binary")
	}
	if _, err := f.Write([]byte("x")); err == nil {
		t.Error("OpenWasm returned a writable file")
	}
	if got, err := a.Descriptors(t.Context(), r.store); err != nil || string(got) != string(set) {
		t.Errorf("Descriptors = %q, %v; want %q", got, err, set)
	}
	if got, err := a.Metadata(t.Context(), r.store); err != nil || got != nil {
		t.Errorf("Metadata = %q, %v; want nil", got, err)
	}
}

// TestBuiltArtifactWithCode checks that compiled code comes behind the layers that other runtimes read, and is found again.
func TestBuiltArtifactWithCode(t *testing.T) {
	r := newRig(t)
	wasm, set, code, envelope := example(t, "greeter-c"), []byte("a descriptor set"), []byte("compiled code"), []byte("an envelope")
	built, err := Build(Spec{Wasm: wasm, Descriptors: set, Code: code, Envelope: envelope})
	r.must(err)
	var m ocispec.Manifest
	r.must(json.Unmarshal(built.Manifest.Data, &m))
	var types []string
	for _, layer := range m.Layers {
		types = append(types, layer.MediaType)
	}
	if want := []string{image.MediaTypeWasm, image.MediaTypeDescriptorSet, image.MediaTypeWasmCode,
		image.MediaTypeEnvelope}; !slices.Equal(types, want) {
		t.Errorf("layers = %v, want %v", types, want)
	}
	a := r.pull("greeter:1", built.Manifest, built.Blobs...)
	if a.Code.Digest != digest.FromBytes(code) || a.Code.Size != int64(len(code)) {
		t.Errorf("Code = %+v, want the layer with the code", a.Code)
	}
	if got, err := a.ReadEnvelope(t.Context(), r.store); err != nil || string(got) != string(envelope) {
		t.Errorf("ReadEnvelope = %q, %v; want %q", got, err, envelope)
	}
	if plain, err := Build(Spec{Wasm: wasm, Descriptors: set}); err != nil || len(plain.Blobs) != len(built.Blobs)-2 {
		t.Errorf("Build without code = %d blobs, %v; want two less than %d", len(plain.Blobs), err, len(built.Blobs))
	}
}

// TestDescriptorsInASection checks that descriptors are read from the binary's section, unless there is a layer.
func TestDescriptorsInASection(t *testing.T) {
	r := newRig(t)
	name := SectionDescriptors
	section := string(rune(len(name))) + name + "in a section"
	wasm := append(example(t, "hello-http-c"), "\x00"+string(rune(len(section)))+section...)
	built, err := Build(Spec{Wasm: wasm})
	r.must(err)
	if world, err := Check(built.Outline, nil); world != wit.WorldGRPC || err != nil {
		t.Errorf("Check = %q, %v; want %q", world, err, wit.WorldGRPC)
	}
	got, err := r.pull("section:1", built.Manifest, built.Blobs...).Descriptors(t.Context(), r.store)
	if err != nil || string(got) != "in a section" {
		t.Errorf("Descriptors = %q, %v; want the section's", got, err)
	}
	built, err = Build(Spec{Wasm: wasm, Descriptors: []byte("in a layer")})
	r.must(err)
	got, err = r.pull("layer:1", built.Manifest, built.Blobs...).Descriptors(t.Context(), r.store)
	if err != nil || string(got) != "in a layer" {
		t.Errorf("Descriptors = %q, %v; want the layer's", got, err)
	}
}

func TestVimanaLayout(t *testing.T) {
	r := newRig(t)
	config, wasm := image.NewBlob(ocispec.MediaTypeEmptyJSON, []byte("{}")), image.NewBlob(image.MediaTypeWasm, example(t, "greeter-c"))
	meta := image.NewBlob(image.MediaTypeMetadata, []byte("a metadata message"))
	manifest := manifestOf(t, config, wasm, meta)
	a := r.pull("vimana:1", manifest, config, wasm, meta)
	if got, err := a.Metadata(t.Context(), r.store); err != nil || string(got) != "a metadata message" || a.Layout != image.LayoutVimana {
		t.Errorf("Metadata = %q, %v with layout %s; want the metadata message with layout %s", got, err, a.Layout, image.LayoutVimana)
	}
	if got, err := a.Descriptors(t.Context(), r.store); err != nil || got != nil {
		t.Errorf("Descriptors = %q, %v; want nil", got, err)
	}
}

func TestUnknownImage(t *testing.T) {
	r := newRig(t)
	if _, err := Open(t.Context(), r.store, "none"); !errdefs.IsNotFound(err) {
		t.Errorf("Open = %v, want ErrNotFound", err)
	}
}

func TestArgv(t *testing.T) {
	a := &Artifact{Program: "app.wasm", Entrypoint: []string{"-v"}, Cmd: []string{"serve"}}
	for want, c := range map[string]struct{ command, args []string }{
		"app.wasm -v serve": {},
		"app.wasm -v x y":   {args: []string{"x", "y"}},
		"other":             {command: []string{"other"}},
		"other -a x":        {command: []string{"other", "-a"}, args: []string{"x"}},
	} {
		if got := strings.Join(a.Argv(c.command, c.args), " "); got != want {
			t.Errorf("Argv(%q, %q) = %q, want %q", c.command, c.args, got, want)
		}
	}
	if strings.Join(a.Entrypoint, "")+strings.Join(a.Cmd, "") != "-vserve" {
		t.Error("Argv has changed the artifact")
	}
}

func TestCheck(t *testing.T) {
	greeter := []string{"proto:greet-v1/greeter"}
	component := func(exports, imports string) *wasmbin.Outline {
		return &wasmbin.Outline{Component: true, Exports: strings.Fields(exports), Imports: strings.Fields(imports)}
	}
	module := func(export, imports string) *wasmbin.Outline {
		return &wasmbin.Outline{Exports: strings.Fields(export), Imports: []string{imports}}
	}
	raw := func(exports ...string) *wasmbin.Outline {
		return &wasmbin.Outline{Exports: append(exports, "tripod:grpc/handler@0.1.0#handle", "memory", "cabi_realloc"),
			Imports: []string{"tripod:grpc/raw@0.1.0 take"}}
	}
	for name, c := range map[string]struct {
		outline  *wasmbin.Outline
		services []string
		world    wit.World
		words    string
	}{
		"grpc": {component("proto:greet-v1/greeter",
			"tripod:grpc/types@0.1.0 proto:greet-v1/types proto:greet-v1/greeter-streams wasi:cli/exit@0.2.12"), greeter, wit.WorldGRPC, ""},
		"http":     {component("wasi:http/incoming-handler@0.2.0", "wasi:http/types@0.2.0"), nil, wit.WorldHTTP, ""},
		"run":      {component("wasi:cli/run@0.2.3", ""), nil, wit.WorldCommand, ""},
		"channels": {component("wasi:cli/run@0.2.3", "tripod:edge/channels@0.1.0"), nil, wit.WorldCommand, ""},
		"server channels": {component("wasi:http/incoming-handler@0.2.0", "tripod:edge/channels@0.1.0"), nil, "",
			"imports tripod:edge/channels@0.1.0, which"},
		"messages": {component("wasi:messaging/incoming-handler@0.2.0-draft",
			"wasi:messaging/types@0.2.0-draft wasi:messaging/producer@0.2.0-draft"), nil, wit.WorldMessages, ""},
		"request-reply": {component("wasi:messaging/incoming-handler@0.2.0-draft", "wasi:messaging/request-reply@0.2.0-draft"), nil, "",
			"imports wasi:messaging/request-reply@0.2.0-draft, which no node provides"},
		"start": {module("_start", "wasi_snapshot_preview1 fd_write"), nil, wit.WorldCommand, ""},
		"other service": {component("proto:other/greeter x", ""), greeter, "",
			"does not export proto:greet-v1/greeter, which its descriptors require; it exports proto:other/greeter, x"},
		"no descriptors": {component("proto:greet-v1/greeter", "proto:greet-v1/types"), nil, "", "--proto"},
		"nothing":        {component("", ""), nil, "", "exports nothing"},
		"unknown import": {component("proto:greet-v1/greeter", "acme:secrets/store"), greeter, "", "imports acme:secrets/store"},
		"other package":  {component("proto:greet-v1/greeter", "proto:greet/types"), greeter, "", "imports proto:greet/types"},
		"wasi 0.3": {component("wasi:http/incoming-handler@0.2.0", "wasi:io/poll@0.3.0"), nil, "",
			"the component is of WASI 0.3 (wasi:io/poll@0.3.0), which Tripod does not run"},
		"wasi 0.3 server": {component("wasi:http/handler@0.3.0-rc-2026-01-06", "wasi:http/types@0.3.0-rc-2026-01-06"), nil, "",
			"build it for WASI 0.2"},
		"draft": {component("wasi:http/incoming-handler@0.2.0", "wasi:config/store@0.2.0-rc.1 wasi:logging/logging@0.1.0-draft"), nil,
			wit.WorldHTTP, ""},
		"draft module": {module("tripod:grpc/handler@0.1.0#handle memory cabi_realloc", "wasi:logging/logging@0.1.0-draft log"), nil,
			wit.WorldRaw, ""},
		"other draft": {component("wasi:http/incoming-handler@0.2.0", "wasi:config/store@0.2.0-draft"), nil, "",
			"imports wasi:config/store@0.2.0-draft, which no node provides (they provide wasi:config/store@0.2.0-rc.1)"},
		"objects": {component("wasi:http/incoming-handler@0.2.0",
			"wasi:blobstore/blobstore@0.2.0-draft wasi:blobstore/types@0.2.0-draft"), nil, wit.WorldHTTP, ""},
		"other objects": {component("wasi:http/incoming-handler@0.2.0", "wasi:blobstore/blobstore@0.2.0-draft-2024-09-01"), nil, "",
			"imports wasi:blobstore/blobstore@0.2.0-draft-2024-09-01, which no node provides (they provide wasi:blobstore/blobstore@0.2.0-draft)"},
		"module objects": {module("tripod:grpc/handler@0.1.0#handle memory cabi_realloc", "wasi:blobstore/blobstore@0.2.0-draft get-container"),
			nil, "", "which no node provides to a core module"},
		"later draft": {component("wasi:http/incoming-handler@0.2.0", "wasi:config/store@0.2.0"), nil, "",
			"imports wasi:config/store@0.2.0, which"},
		"draft package": {component("wasi:http/incoming-handler@0.2.0", "wasi:nn/graph@0.2.0"), nil, "", "imports wasi:nn/graph@0.2.0"},
		"old draft": {component("wasi:cli/run@0.2.0", "wasi:io/streams@0.2.0-rc-2023-11-10"), nil, "",
			"imports wasi:io/streams@0.2.0-rc-2023-11-10"},
		"draft export": {component("wasi:cli/run@0.2.0-rc-2023-12-05", ""), nil, "",
			"none of wasi:http/incoming-handler@0.2, wasi:messaging/incoming-handler@0.2.0-draft and wasi:cli/run@0.2"},
		"library":        {module("memory", ""), nil, "", "does not export _start"},
		"module import":  {module("_start", "env missing"), nil, "", `imports "missing" from "env"`},
		"module service": {module("_start", ""), greeter, "", "a core module cannot serve proto:greet-v1/greeter"},
		"raw":            {raw(), nil, wit.WorldRaw, ""},
		"raw program":    {raw("_start"), nil, "", "but also _start; build it as a library"},
	} {
		world, err := Check(c.outline, c.services)
		if world != c.world || (err == nil) != (c.words == "") {
			t.Errorf("%s: Check = %q, %v; want %q", name, world, err, c.world)
		}
		if err != nil && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.words)) {
			t.Errorf("%s: Check = %v, want ErrInvalidArgument with %q", name, err, c.words)
		}
	}
}

func TestBuildRefuses(t *testing.T) {
	wasm := example(t, "hello-http-c")
	for _, s := range []Spec{{}, {Wasm: []byte("text")}, {Wasm: wasm[:len(wasm)-1]},
		{Wasm: wasm, Descriptors: make([]byte, maxDescriptors+1)}} {
		if _, err := Build(s); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Build with %d bytes = %v, want ErrInvalidArgument", len(s.Wasm), err)
		}
	}
}

func TestNameAnnotations(t *testing.T) {
	got, err := NameAnnotations("p/", "example.com:foo.Bar@1.2.3-a+b5")
	if err != nil || len(got) != 3 || got["p/domain"] != "example.com" || got["p/server"] != "foo.Bar" || got["p/version"] != "1.2.3-a_b5" {
		t.Errorf("NameAnnotations = %v, %v", got, err)
	}
	for _, bad := range []string{"", "Bar", "example.com:Bar", "Bar@1.0.0", "UP:Bar@1.0.0", "example.com:@1.0.0", "example.com:a/b@1.0.0",
		"example.com:Bar@1", "example.com:Bar@1.0.0-" + strings.Repeat("x", 60)} {
		if got, err := NameAnnotations("p/", bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("NameAnnotations(%q) = %v, %v; want ErrInvalidArgument", bad, got, err)
		}
	}
}
