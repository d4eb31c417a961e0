package wasihttp

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasi"
)

var cloudCode = sync.OnceValues(func() (*engine.Code, error) { return compile("cloud-c") })

// getText sends a request to the example cloud-c and returns the status and the text of the response.
func getText(t *testing.T, url string, headers map[string]string) (int, string) {
	t.Helper()
	r := request(t, http.MethodGet, url, nil)
	for name, value := range headers {
		r.Header.Set(name, value)
	}
	return answerTo(t, r)
}

// TestCloudGuest: a guest reads its configuration and logs, on both paths.
func TestCloudGuest(t *testing.T) {
	volume := t.TempDir()
	for name, text := range map[string]string{"color": "blue", "binary": "\xff"} {
		if err := os.WriteFile(filepath.Join(volume, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	var log strings.Builder
	pathsOf(t, cloudCode, wasi.Options{
		Config: wasi.Config{Env: []string{"MODE=fast"}, Volumes: []string{volume}},
		Log: func(entry []byte) {
			mu.Lock()
			defer mu.Unlock()
			log.Write(entry)
		},
	}, func(t *testing.T, url string) {
		for path, want := range map[string]struct {
			status int
			text   string
		}{
			"/config/color": {200, "blue"}, "/config/MODE": {200, "fast"}, "/config/missing": {404, ""}, "/config/../color": {404, ""},
			"/config/binary": {502, `"binary": the value is not UTF-8`}, "/config": {200, "MODE=fast\ncolor=blue\n"},
		} {
			if status, text := getText(t, url+path, nil); status != want.status || text != want.text {
				t.Errorf("%s = %d %q, want %d %q", path, status, text, want.status, want.text)
			}
		}
		log.Reset()
		getText(t, url+"/log", map[string]string{"x-level": "3", "x-context": "orders", "x-message": "two words"})
		if got, want := log.String(), "level=WARN msg=\"two words\" context=orders\n"; got != want {
			t.Errorf("the log is %q, want %q", got, want)
		}
	})
}
