package image

import (
	"crypto/rand"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
)

// largeDisk returns an artifact with a disk that takes several ranges, and the disk.
func largeDisk(t testing.TB) (*rawImage, []byte) {
	t.Helper()
	content := make([]byte, 5*rangeSize+512)
	_, err := io.ReadFull(rand.Reader, content[512:]) // the first bytes would be a boot sector
	check(t, err)
	img := raw(t)
	img.manifest.Layers = []ocispec.Descriptor{img.add(disk.MediaTypeRaw, content)}
	return img, content
}

// A large blob arrives in several requests, and in one if the registry ignores ranges.
func TestRanges(t *testing.T) {
	for name, c := range map[string]struct {
		ranges       int
		ignores      bool
		breaks       int32 // the number of requests that end early
		least, limit int
	}{
		"one request":                {ranges: 1, least: 1, limit: 1},
		"several":                    {ranges: 4, least: 6, limit: 6},
		"ranges ignored":             {ranges: 4, ignores: true, least: 1, limit: 1},
		"several broken connections": {ranges: 4, breaks: 3, least: 6, limit: 24},
	} {
		t.Run(name, func(t *testing.T) {
			reg := newRegistry(t)
			img, disk := largeDisk(t)
			ref := img.push(t, reg, "disk")
			var requests, broken atomic.Int32
			reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, string(img.manifest.Layers[0].Digest)) || r.Method != http.MethodGet {
					return false
				}
				requests.Add(1)
				if c.ignores {
					w.Header().Set("Content-Length", strconv.Itoa(len(disk)))
					_, _ = w.Write(disk)
					return true
				}
				answer := httptest.NewRecorder()
				http.ServeContent(answer, r, "", testTime, strings.NewReader(string(disk)))
				for k, v := range answer.Header() {
					w.Header()[k] = v
				}
				w.WriteHeader(answer.Code)
				body := answer.Body.Bytes()
				if broken.Add(1) <= c.breaks {
					body = body[:len(body)/10]
				}
				_, _ = w.Write(body)
				return true
			})
			s := open(t, Config{RangesPerBlob: c.ranges})
			got := pull(t, s, ref)
			if n := int(requests.Load()); n < c.least || n > c.limit {
				t.Errorf("got %d requests for the blob, want %d to %d", n, c.least, c.limit)
			}
			if data := read(t, blobPath(s, got.Layers[0].Digest)); data != string(disk) {
				t.Error("the stored blob differs from the registry's")
			}
		})
	}
}

// Ranges of wrong content are detected by the digest of the whole.
func TestRangesOfWrongContent(t *testing.T) {
	reg := newRegistry(t)
	img, disk := largeDisk(t)
	ref := img.push(t, reg, "disk")
	disk[3*rangeSize]++
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		http.ServeContent(w, r, "", testTime, strings.NewReader(string(disk)))
		return true
	})
	s := open(t, Config{RangesPerBlob: 4})
	_, err := s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsDataLoss)
	if _, err := s.Get(t.Context(), ref); !errdefs.IsNotFound(err) {
		t.Errorf("an image with wrong content is stored: %v", err)
	}
}
