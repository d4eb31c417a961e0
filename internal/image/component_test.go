package image

import (
	"archive/tar"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/registry"
)

// wasmOf returns a core module that holds text in a custom section.
func wasmOf(text string) []byte {
	section := append([]byte{1, 't'}, text...)
	if len(section) > 0x7f {
		panic("a longer section wants a longer LEB128 number")
	}
	return append([]byte("\x00asm\x01\x00\x00\x00\x00"+string(rune(len(section)))), section...)
}

// artifactOf returns an artifact with a config type and layers of types and contents.
func artifactOf(configType string, layers ...any) *rawImage {
	m := &rawImage{}
	m.manifest.SchemaVersion, m.manifest.MediaType = 2, ocispec.MediaTypeImageManifest
	m.manifest.Config = m.add(configType, []byte(`{"architecture":"wasm","os":"wasip2"}`))
	for i := 0; i < len(layers); i += 2 {
		m.manifest.Layers = append(m.manifest.Layers, m.add(layers[i].(string), layers[i+1].([]byte)))
	}
	return m
}

func TestComponentLayouts(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	wasm, set, meta, code, envelope := wasmOf("binary"), []byte("descriptors"), []byte("metadata"), []byte("code"), []byte("envelope")
	for name, c := range map[string]struct {
		artifact *rawImage
		want     Component
	}{
		"plain": {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm), Component{Layout: LayoutCNCF}},
		"descriptors": {artifactOf(MediaTypeWasmConfig, MediaTypeDescriptorSet, set, MediaTypeWasm, wasm),
			Component{Layout: LayoutCNCF, Descriptors: NewBlob(MediaTypeDescriptorSet, set).Descriptor}},
		"code": {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm, MediaTypeWasmCode, code, MediaTypeEnvelope, envelope),
			Component{Layout: LayoutCNCF, Code: NewBlob(MediaTypeWasmCode, code).Descriptor,
				Envelope: NewBlob(MediaTypeEnvelope, envelope).Descriptor}},
		"vimana": {artifactOf(ocispec.MediaTypeEmptyJSON, MediaTypeWasm, wasm, MediaTypeMetadata, meta),
			Component{Layout: LayoutVimana, Metadata: NewBlob(MediaTypeMetadata, meta).Descriptor}},
		"old": {artifactOf("application/vnd.wasm.config.v1+json", "application/vnd.wasm.content.layer.v1+wasm", wasm),
			Component{Layout: LayoutCNCF}},
	} {
		img := pull(t, s, c.artifact.push(t, reg, name))
		c.want.Wasm = img.Component.Wasm
		if !reflect.DeepEqual(*img.Component, c.want) || img.Component.Wasm.Digest != digest.FromBytes(wasm) || img.Kind != KindComponent {
			t.Errorf("%s: got component %+v of kind %s, want %+v", name, img.Component, img.Kind, c.want)
		}
		desc, err := s.ComponentBlob(t.Context(), img.ID)
		check(t, err)
		if !reflect.DeepEqual(desc, img.Component.Wasm) {
			t.Errorf("%s: ComponentBlob = %+v, want %+v", name, desc, img.Component.Wasm)
		}
		var size uint64
		for _, blob := range c.artifact.blobs {
			size += uint64(len(blob))
		}
		if img.Size <= size || len(img.RepoTags) != 1 || len(img.RepoDigests) != 1 || img.ID != img.Manifest.String() {
			t.Errorf("%s: got image %+v, want one tag, one digest and the manifest's digest as the ID", name, img)
		}
	}
	plain := pull(t, s, reg.push(t, "rootfs:1", oneFileImage(t, "x")))
	_, err := s.ComponentBlob(t.Context(), plain.ID)
	wantError(t, err, errdefs.IsInvalidArgument, plain.ID, ".wasm")
}

// TestI6NotAComponent: a pull rejects an invalid component artifact and keeps no data of it.
func TestI6NotAComponent(t *testing.T) {
	limits := Limits{ComponentBytes: 1000, DocumentBytes: 1000}
	reg, s := newRegistry(t), open(t, Config{Limits: limits})
	wasm := wasmOf("binary")
	for name, c := range map[string]struct {
		artifact *rawImage
		words    []string
	}{
		"no binary": {artifactOf(MediaTypeWasmConfig, "application/octet-stream", wasm),
			[]string{"application/octet-stream", MediaTypeWasm}},
		"descriptors only": {artifactOf(MediaTypeWasmConfig, MediaTypeDescriptorSet, wasm), []string{"no layer", MediaTypeWasm}},
		"two binaries": {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm, MediaTypeWasm, wasmOf("second")),
			[]string{"two layers", MediaTypeWasm}},
		"unknown layer":   {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm, "text/plain", wasm), []string{"text/plain"}},
		"not wasm":        {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, []byte("#!/bin/sh\necho")), []string{"not WebAssembly", "#!/bin/s"}},
		"short":           {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm[:6]), []string{"not WebAssembly"}},
		"truncated":       {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm[:len(wasm)-1]), []string{"cut off"}},
		"unknown version": {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, []byte("\x00asm\x07\x00\x01\x00")), []string{"version 7"}},
		"large":           {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, make([]byte, 1001)), []string{"1001", "1000"}},
		"many descriptors": {artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm, MediaTypeDescriptorSet, make([]byte, 1001)),
			[]string{"1001", "1000"}},
	} {
		_, err := s.Pull(t.Context(), c.artifact.push(t, reg, strings.ReplaceAll(name, " ", "-")), PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, c.words...)
	}
	if all, _ := s.List(t.Context()); len(all) > 0 {
		t.Errorf("List after invalid artifacts = %+v, want no images", all)
	}
	wantEmpty(t, s)
}

// readComponent reads the binary of an image through OpenBlob.
func readComponent(t testing.TB, s *Store, desc ocispec.Descriptor) string {
	t.Helper()
	f, err := s.OpenBlob(t.Context(), desc)
	check(t, err)
	defer f.Close()
	data, err := io.ReadAll(f)
	check(t, err)
	return string(data)
}

func TestHoldKeepsBlobs(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	wasm := wasmOf("held")
	img := pull(t, s, artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm).push(t, reg, "held"))
	other := pull(t, s, artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasmOf("other")).push(t, reg, "other"))
	check(t, s.Hold(t.Context(), "c1", img.ID))
	check(t, s.Hold(t.Context(), "c1", img.ID))
	wantError(t, s.Hold(t.Context(), "c1", other.ID), errdefs.IsAlreadyExists, "c1")
	wantError(t, s.Hold(t.Context(), "c2", "none"), errdefs.IsNotFound, "c2")
	wantError(t, s.Hold(t.Context(), "", img.ID), errdefs.IsInvalidArgument)
	check(t, s.Remove(t.Context(), img.ID))
	check(t, s.Remove(t.Context(), other.ID))

	root := s.cfg.Root
	check(t, s.Close())
	s = open(t, Config{Root: root})
	check(t, s.Collect(t.Context()))
	if got := readComponent(t, s, img.Component.Wasm); got != string(wasm) {
		t.Errorf("held binary: got %q, want %q", got, wasm)
	}
	_, err := s.OpenBlob(t.Context(), other.Component.Wasm)
	wantError(t, err, errdefs.IsNotFound)
	keys, err := s.Holds(t.Context())
	check(t, err)
	if !slices.Equal(keys, []string{"c1"}) {
		t.Errorf("Holds() = %q, want c1", keys)
	}
	check(t, s.Unhold(t.Context(), "c1"))
	check(t, s.Unhold(t.Context(), "c1"))
	wantEmpty(t, s)
}

func TestDamagedComponentIsPulledAgain(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasmOf("good")).push(t, reg, "app")
	img := pull(t, s, ref)
	bad := wasmOf("evil")
	check(t, os.Chmod(blobPath(s, img.Component.Wasm.Digest), 0o600))
	check(t, os.WriteFile(blobPath(s, img.Component.Wasm.Digest), bad, 0o600))
	_, err := s.OpenBlob(t.Context(), img.Component.Wasm)
	wantError(t, err, errdefs.IsDataLoss, img.Component.Wasm.Digest.String())
	if _, err := s.Get(t.Context(), ref); !errdefs.IsNotFound(err) {
		t.Errorf("Get of the damaged image: got error %v, want not found", err)
	}
	img = pull(t, s, ref)
	if got := readComponent(t, s, img.Component.Wasm); got != string(wasmOf("good")) {
		t.Errorf("binary after another pull: got %q, want %q", got, wasmOf("good"))
	}
}

// TestDamagedOptionalBlob checks that the image stays, and that the next pull repairs the blob.
func TestDamagedOptionalBlob(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasmOf("good")).push(t, reg, "app")
	img := pull(t, s, ref)
	path := blobPath(s, img.Component.Wasm.Digest)
	for name, damage := range map[string]func() error{
		"changed": func() error { return os.WriteFile(path, wasmOf("evil"), 0o600) },
		"gone":    func() error { return os.Remove(path) },
	} {
		t.Run(name, func(t *testing.T) {
			check(t, os.Chmod(path, 0o600))
			check(t, damage())
			_, err := s.OpenOptionalBlob(t.Context(), img.Component.Wasm)
			wantError(t, err, errdefs.IsDataLoss, img.Component.Wasm.Digest.String())
			if _, err := s.Get(t.Context(), ref); err != nil {
				t.Errorf("Get of the image: got error %v, want the image", err)
			}
			pull(t, s, ref)
			if got := readComponent(t, s, img.Component.Wasm); got != string(wasmOf("good")) {
				t.Errorf("binary after another pull: got %q, want %q", got, wasmOf("good"))
			}
		})
	}
}

func dirEntry(name string) entryOf {
	return entryOf{Header: tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}}
}

func link(name, target string) entryOf {
	return entryOf{Header: tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target}}
}

func TestEntrypointBecomesABlob(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	old, wasm := string(wasmOf("old")), string(wasmOf("new"))
	low := tarOf(t, dirEntry("opt"), file("opt/main.wasm", old), link("app", "/../../opt"))
	high := tarOf(t, file("opt/main.wasm", wasm))
	config := v1.Config{WorkingDir: "/app", Entrypoint: []string{"./main.wasm"}, Cmd: []string{"x"}}
	ref := reg.push(t, "app:1", imageOf(t, config, low, high))
	img := pull(t, s, ref)
	if img.Kind != KindRootfs || !reflect.DeepEqual(*img.Component, Component{Layout: LayoutRootfs, Entrypoint: "/app/main.wasm"}) {
		t.Fatalf("got kind %s and component %+v, want a rootfs with the entrypoint /app/main.wasm", img.Kind, img.Component)
	}
	desc, err := s.ComponentBlob(t.Context(), img.ID)
	check(t, err)
	if got := readComponent(t, s, desc); got != wasm {
		t.Errorf("entrypoint's binary: got %q, want %q", got, wasm)
	}
	check(t, s.Collect(t.Context()))
	if keys, _ := s.Snapshots(t.Context()); len(keys) > 0 {
		t.Errorf("Snapshots() = %q, want none", keys)
	}
	single := imageOf(t, v1.Config{Cmd: []string{"/main.wasm"}}, tarOf(t, file("main.wasm", old)))
	one, err := s.ComponentBlob(t.Context(), pull(t, s, reg.push(t, "single:1", single)).ID)
	check(t, err)
	if got := readComponent(t, s, one); got != old {
		t.Errorf("entrypoint's binary of the image with one layer: got %q, want %q", got, old)
	}

	// The component's blob survives a restart and, once held, its image's removal.
	root := s.cfg.Root
	check(t, s.Close())
	s = open(t, Config{Root: root})
	again, err := s.ComponentBlob(t.Context(), ref)
	check(t, err)
	check(t, s.Hold(t.Context(), "c1", img.ID))
	check(t, s.Remove(t.Context(), ref))
	check(t, s.Remove(t.Context(), reg.ref("single:1")))
	check(t, s.Collect(t.Context()))
	if got := readComponent(t, s, again); again.Digest != desc.Digest || got != wasm {
		t.Errorf("entrypoint's blob after a restart: got %+v with %q, want digest %s", again, got, desc.Digest)
	}
	check(t, s.Unhold(t.Context(), "c1"))
	wantEmpty(t, s)
}

func TestBadEntrypoints(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{Limits: Limits{ComponentBytes: 100}})
	// A file outside the image must be unreachable.
	outside := filepath.Join(t.TempDir(), "outside.wasm")
	check(t, os.WriteFile(outside, wasmOf("outside"), 0o600))
	for name, c := range map[string]struct {
		entry entryOf
		words string
	}{
		"missing":   {file("other", "x"), "no such file"},
		"directory": {dirEntry("main.wasm"), "not a regular file"},
		"fifo":      {entryOf{Header: tar.Header{Name: "main.wasm", Typeflag: tar.TypeFifo, Mode: 0o644}}, "not a regular file"},
		"text":      {file("main.wasm", "#!/bin/sh"), "not WebAssembly"},
		"truncated": {file("main.wasm", string(wasmOf("text")[:10])), "cut off"},
		"empty":     {file("main.wasm", ""), "0 bytes"},
		"large":     {file("main.wasm", strings.Repeat("x", 101)), "101 bytes"},
		"absolute":  {link("main.wasm", outside), "no such file"},
		"relative":  {link("main.wasm", "../../../../../../../.."+outside), "no such file"},
		"procfs":    {link("main.wasm", "/proc/self/exe"), "no such file"},
		"loop":      {link("main.wasm", "main.wasm"), "symbolic links"},
	} {
		img := pull(t, s, reg.push(t, name+":1", imageOf(t, v1.Config{Entrypoint: []string{"/main.wasm"}}, tarOf(t, c.entry))))
		_, err := s.ComponentBlob(t.Context(), img.ID)
		wantError(t, err, errdefs.IsInvalidArgument, "/main.wasm", c.words)
		check(t, s.Remove(t.Context(), img.ID))
	}
	wantEmpty(t, s)
}

// TestEntrypointUnderManyLayers: mount options must fit in a page.
func TestEntrypointUnderManyLayers(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	var layers [][]byte
	for i := range 120 {
		layers = append(layers, tarOf(t, file(fmt.Sprintf("f%d", i), "x")))
	}
	wasm := string(wasmOf("lowest"))
	layers[0] = tarOf(t, file("main.wasm", wasm))
	img := pull(t, s, reg.push(t, "deep:1", imageOf(t, v1.Config{Entrypoint: []string{"main.wasm"}}, layers...)))
	desc, err := s.ComponentBlob(t.Context(), img.ID)
	check(t, err)
	if got := readComponent(t, s, desc); got != wasm {
		t.Errorf("component: got %q, want %q", got, wasm)
	}
}

func TestPush(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	registries := registry.Config{PlainHTTP: true}
	wasm := NewBlob(MediaTypeWasm, wasmOf("pushed"))
	art := artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm.Data)
	document := fmt.Appendf(nil,
		`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":%q,"digest":%q,"size":%d},"layers":[{"mediaType":%q,"digest":%q,"size":%d}]}`,
		ocispec.MediaTypeImageManifest, MediaTypeWasmConfig, art.manifest.Config.Digest, art.manifest.Config.Size, wasm.MediaType, wasm.Digest,
		wasm.Size)
	manifest := NewBlob(ocispec.MediaTypeImageManifest, document)
	blobs := []Blob{NewBlob(MediaTypeWasmConfig, art.blobs[0]), wasm}
	ref := reg.ref("some/app:1")
	var sent []Progress
	name, err := Push(t.Context(), registries, ref, nil, func(p Progress) { sent = append(sent, p) }, manifest, blobs...)
	check(t, err)
	total := manifest.Size + blobs[0].Size + blobs[1].Size
	if last := sent[len(sent)-1]; len(sent) < 2*len(blobs) || last.Done != total || sent[0].Total != total || last.Current != manifest.Digest {
		t.Errorf("progress of the push: got %+v, want %d bytes at the end, the last of %s", sent, total, manifest.Digest)
	}
	if want := reg.ref("some/app@") + manifest.Digest.String(); name != want {
		t.Errorf("Push() = %s, want %s", name, want)
	}
	img := pull(t, s, ref)
	if img.Manifest != manifest.Digest || readComponent(t, s, img.Component.Wasm) != string(wasm.Data) {
		t.Errorf("pulled image: got %+v, want manifest %s", img, manifest.Digest)
	}
	reg.forget()
	_, err = Push(t.Context(), registries, ref, nil, nil, manifest, blobs...)
	check(t, err)
	if n := reg.count("PUT") + reg.count("POST") + reg.count("PATCH"); n != 0 {
		t.Errorf("second push of the same image: got %d writes, want 0", n)
	}
	_, err = Push(t.Context(), registries, reg.ref("some/app@")+wasm.Digest.String(), nil, nil, manifest, blobs...)
	wantError(t, err, errdefs.IsInvalidArgument, manifest.Digest.String())

	reg.guard("me", "secret")
	_, err = Push(t.Context(), registries, ref, nil, nil, manifest, blobs...)
	wantError(t, err, errdefs.IsUnauthorized, "some/app:1", "push")
	_, err = Push(t.Context(), registries, reg.ref("some/app:2"), &registry.Auth{Username: "me", Password: "secret"}, nil, manifest, blobs...)
	check(t, err)
	reg.setHook(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	_, err = Push(t.Context(), registries, ref, nil, nil, manifest, blobs...)
	wantError(t, err, errdefs.IsUnavailable, ref)
	// Pushes go to the hosts in hosts.toml, too.
	reg.setHook(nil)
	elsewhere := registry.Config{HostsDir: []string{hostsToml(t, "registry.example", fmt.Sprintf("server = %q\n", reg.URL))}}
	_, err = Push(t.Context(), elsewhere, "registry.example/some/app:3", nil, nil, manifest, blobs...)
	check(t, err)
	pull(t, s, reg.ref("some/app:3"))
}
