package image

import (
	"net/http"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/registry"
)

// TestFetchComponent fetches components without a store: by tag, by digest and through an index.
func TestFetchComponent(t *testing.T) {
	reg, access := newRegistry(t), registry.Config{PlainHTTP: true}
	wasm, set := wasmOf("binary"), []byte("descriptors")
	artifact := artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm, MediaTypeDescriptorSet, set)
	artifact.manifest.Annotations = map[string]string{"note": "x"}
	refs := []string{artifact.push(t, reg, "app")}
	_, target, err := mustResolve(t, access, refs[0])
	check(t, err)
	refs = append(refs, reg.ref("app@"+target.Digest.String()))
	target.Platform = &ocispec.Platform{OS: "wasip2", Architecture: "wasm"}
	refs = append(refs, reg.pushRaw(t, "app", "index", ocispec.MediaTypeImageIndex,
		ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{target}}))
	for _, ref := range refs {
		got, err := FetchComponent(t.Context(), access, ref, nil)
		check(t, err)
		if string(got.Binary) != string(wasm) || string(got.DescriptorSet) != string(set) || got.Annotations["note"] != "x" ||
			got.Layout != LayoutCNCF {
			t.Errorf("FetchComponent(%s) = %+v", ref, got)
		}
	}
	if n := reg.count("POST") + reg.count("PUT"); n != 0 {
		t.Errorf("FetchComponent wrote %d times", n)
	}
}

// mustResolve returns what a reference refers to.
func mustResolve(t *testing.T, access registry.Config, ref string) (string, ocispec.Descriptor, error) {
	t.Helper()
	named, err := reference.ParseDockerRef(ref)
	check(t, err)
	resolver, _, err := access.Resolver(t.Context(), named, nil)
	check(t, err)
	return resolver.Resolve(t.Context(), named.String())
}

// TestFetchComponentRefuses checks that a registry cannot pass off other content as a component, and that images without
// one and unknown images are refused.
func TestFetchComponentRefuses(t *testing.T) {
	reg, access := newRegistry(t), registry.Config{PlainHTTP: true}
	wasm := wasmOf("binary")
	good := artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm).push(t, reg, "good")
	large := artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm)
	large.manifest.Layers[0].Size = 1 << 40
	var nested string
	child := reg.pushRaw(t, "nested", "0", ocispec.MediaTypeImageIndex, ocispec.Index{MediaType: ocispec.MediaTypeImageIndex})
	for depth := range 6 {
		_, target, err := mustResolve(t, access, child)
		check(t, err)
		child = reg.pushRaw(t, "nested", strings.Repeat("x", depth+1), ocispec.MediaTypeImageIndex,
			ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{target}})
		nested = child
	}
	serve := func(body string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, digest.FromBytes(wasm).String()) {
				return false
			}
			_, _ = w.Write([]byte(body))
			return true
		}
	}
	for name, c := range map[string]struct {
		ref  string
		hook func(http.ResponseWriter, *http.Request) bool
		is   func(error) bool
		word string
	}{
		"other bytes":       {good, serve(string(wasmOf("binarY"))), errdefs.IsDataLoss, "content is not blob"},
		"fewer bytes":       {good, serve(string(wasm[:9])), errdefs.IsDataLoss, "content is not blob"},
		"more bytes":        {good, serve(string(wasm) + "more"), errdefs.IsDataLoss, "content is not blob"},
		"a large binary":    {large.push(t, reg, "large"), nil, errdefs.IsInvalidArgument, "more than the limit"},
		"nested indexes":    {nested, nil, errdefs.IsInvalidArgument, "nested indexes"},
		"a root filesystem": {reg.push(t, "rootfs:1", oneFileImage(t, "x")), nil, errdefs.IsInvalidArgument, "no artifact with a component"},
		"an unknown image":  {reg.ref("none:1"), nil, errdefs.IsNotFound, "none"},
		"a bad reference":   {reg.ref("UPPER:1"), nil, errdefs.IsInvalidArgument, "UPPER"},
	} {
		reg.setHook(c.hook)
		_, err := FetchComponent(t.Context(), access, c.ref, nil)
		if !c.is(err) || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: FetchComponent = %v; want an error with %q", name, err, c.word)
		}
	}
}
