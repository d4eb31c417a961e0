package wasihttp

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasi"
)

var blobsCode = sync.OnceValues(func() (*engine.Code, error) { return compile("blobs-c") })

// TestBlobsGuest: a guest stores and reads objects as streams, on both paths.
func TestBlobsGuest(t *testing.T) {
	volume := t.TempDir()
	large := strings.Repeat("0123456789abcdef", 40_000)
	pathsOf(t, blobsCode, wasi.Options{Blobs: wasi.NewBlobs(volume)}, func(t *testing.T, url string) {
		for _, c := range []struct {
			method, path, header, value, body string
			status                            int
			want                              string
		}{
			{"PUT", "/c", "", "", "", 200, ""},
			{"PUT", "/c", "", "", "", 502, "the container exists"},
			{"PUT", "/c/large", "", "", large, 200, ""},
			{"GET", "/c/large", "", "", "", 200, large},
			{"GET", "/c/large", "x-range", "15-17", "", 200, "f01"},
			{"GET", "/c/large", "x-size", "1", "", 200, "640000"},
			{"POST", "/c/large", "x-to", "c/copy", "", 200, ""},
			{"POST", "/c/large", "x-to", "../copy", "", 502,
				"a name has 1 to 255 bytes, no slash and no NUL, is not a dot, and does not begin with two dots"},
			{"DELETE", "/c/large", "", "", "", 200, ""},
			{"HEAD", "/c/large", "", "", "", 404, ""},
			{"GET", "/c/large", "", "", "", 502, "there is no such object"},
			{"GET", "/c", "", "", "", 200, "copy\n"},
			{"DELETE", "/c", "", "", "", 200, ""},
			{"GET", "/c", "", "", "", 502, "there is no such container"},
		} {
			r := request(t, c.method, url+c.path, strings.NewReader(c.body))
			if c.header != "" {
				r.Header.Set(c.header, c.value)
			}
			if status, text := answerTo(t, r); status != c.status || text != c.want {
				t.Errorf("%s %s = %d, %.100q; want %d, %.100q", c.method, c.path, status, text, c.status, c.want)
			}
		}
	})
	if left, err := filepath.Glob(filepath.Join(volume, "*", "*")); err != nil || left != nil {
		t.Errorf("the files are %q, %v", left, err)
	}
	if _, err := os.Stat(filepath.Join(volume, "..tripod-uploads")); err != nil {
		t.Error(err)
	}
}
