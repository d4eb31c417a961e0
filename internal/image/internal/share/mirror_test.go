package share

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// deadlines is a response that records its write deadline.
type deadlines struct {
	*httptest.ResponseRecorder
	writes int // deadlines set for writes
	last   time.Time
}

func (d *deadlines) SetWriteDeadline(at time.Time) error {
	d.writes, d.last = d.writes+1, at
	return nil
}

// oneBlob is a store with one blob in a file.
type oneBlob struct {
	blob ocispec.Descriptor
	path string
}

func (o oneBlob) Served(context.Context, reference.Named, bool) []ServedImage {
	return []ServedImage{{Blobs: []ocispec.Descriptor{o.blob}}}
}

func (o oneBlob) Blob(context.Context, ocispec.Descriptor) (string, error) { return o.path, nil }

// The deadline of one transfer must not end the next transfer on the same connection.
func TestMirrorResetsDeadline(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	blob := ocispec.Descriptor{MediaType: "text/plain", Digest: digest.FromString("text"), Size: 4}
	w := &deadlines{ResponseRecorder: httptest.NewRecorder()}
	m := &Mirror{store: oneBlob{blob, text}, transfers: make(chan struct{}, 1)}
	m.ServeHTTP(w, httptest.NewRequest(http.MethodGet, fmt.Sprintf("/v2/app/blobs/%s?ns=registry.example", blob.Digest), nil))
	if w.Code != http.StatusOK || w.Body.Len() == 0 || w.writes < 2 || !w.last.IsZero() {
		t.Errorf("got status %d, %d bytes, %d deadlines, the last %v; want that the last is none", w.Code, w.Body.Len(), w.writes, w.last)
	}
}
