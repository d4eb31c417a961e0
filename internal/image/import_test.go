package image

import (
	"encoding/json"
	"errors"
	"os"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// localArtifact makes an artifact of a binary.
func localArtifact(t testing.TB, wasm []byte) (manifest Blob, blobs []Blob) {
	t.Helper()
	m := artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasm)
	raw, err := json.Marshal(m.manifest)
	check(t, err)
	return NewBlob(ocispec.MediaTypeImageManifest, raw), []Blob{
		NewBlob(MediaTypeWasm, wasm), NewBlob(MediaTypeWasmConfig, []byte(`{"architecture":"wasm","os":"wasip2"}`)),
	}
}

func TestImportOnceAndRemove(t *testing.T) {
	s := open(t, Config{})
	manifest, blobs := localArtifact(t, wasmOf("local"))
	ids := make([]string, 8)
	var all sync.WaitGroup
	for i := range ids {
		all.Go(func() {
			img, err := s.Import(t.Context(), "edge.local/m", manifest, blobs...)
			if err != nil {
				t.Error(err)
			}
			ids[i] = img.ID
		})
	}
	all.Wait()
	img, err := s.Get(t.Context(), "edge.local/m")
	check(t, err)
	for _, id := range ids {
		if id != img.ID || img.Kind != KindComponent || len(img.RepoTags) != 1 {
			t.Errorf("Import() = %+v, want a component with the ID %s and one tag", img, id)
		}
	}
	check(t, s.Collect(t.Context()))
	file, err := s.OpenBlob(t.Context(), img.Component.Wasm)
	check(t, err)
	check(t, file.Close())
	check(t, s.Hold(t.Context(), "user", img.ID))
	check(t, s.Remove(t.Context(), "edge.local/m"))
	check(t, s.Collect(t.Context()))
	file, err = s.OpenBlob(t.Context(), img.Component.Wasm)
	check(t, err) // held
	check(t, file.Close())
	check(t, s.Unhold(t.Context(), "user"))
	wantEmpty(t, s)
}

// TestImportRepairsDamage: a blob that lost its content is written again.
func TestImportRepairsDamage(t *testing.T) {
	s := open(t, Config{})
	wasm := wasmOf("mended")
	manifest, blobs := localArtifact(t, wasm)
	img, err := s.Import(t.Context(), "edge.local/m", manifest, blobs...)
	check(t, err)
	check(t, os.Chmod(s.blobPath(img.Component.Wasm.Digest), 0o600))
	check(t, os.Truncate(s.blobPath(img.Component.Wasm.Digest), 3))
	_, err = s.Import(t.Context(), "edge.local/m", manifest, blobs...)
	check(t, err)
	file, err := s.OpenBlob(t.Context(), img.Component.Wasm)
	check(t, err)
	check(t, file.Close())
}

func TestImportRefuses(t *testing.T) {
	s := open(t, Config{})
	manifest, blobs := localArtifact(t, []byte("no binary"))
	_, err := s.Import(t.Context(), "edge.local/m", manifest, blobs...)
	wantError(t, err, errdefs.IsInvalidArgument)
	manifest, blobs = localArtifact(t, wasmOf("x"))
	_, err = s.Import(t.Context(), "NO/such:name:", manifest, blobs...)
	wantError(t, err, errdefs.IsInvalidArgument)
	blobs[0].Data = wasmOf("y") // does not match its digest
	if _, err = s.Import(t.Context(), "edge.local/m", manifest, blobs...); err == nil || errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("Import of a blob that does not match its digest: got error %v, want one that is not already exists", err)
	}
	wantEmpty(t, s)
}
