package image

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/registry"
)

// TestPresignedManifests: a registry redirects to a store whose signed URLs are for GET only. No signature is in an error or in
// the log.
func TestPresignedManifests(t *testing.T) {
	reg := newRegistry(t)
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	var refuse atomic.Bool
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || refuse.Load() {
			http.Error(w, "SignatureDoesNotMatch", http.StatusForbidden)
			return
		}
		r.URL.RawQuery, r.Header["X-Direct"] = "", []string{"1"}
		resp, err := http.Get(reg.URL + r.URL.Path)
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		var body bytes.Buffer
		_, _ = body.ReadFrom(resp.Body)
		_, _ = w.Write(body.Bytes()) // like an object store: without the registry's headers
	}))
	defer store.Close()
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("User-Agent") != "tripod" || r.URL.Path == "/v2/" {
			return false
		}
		http.Redirect(w, r, store.URL+r.URL.Path+"?X-Amz-Signature=topsecret&X-Amz-Date=1", http.StatusTemporaryRedirect)
		return true
	})
	var log bytes.Buffer
	s := open(t, Config{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	pull(t, s, ref)
	check(t, s.Close()) // its log is complete
	refuse.Store(true)
	_, err := open(t, Config{}).Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsPermissionDenied, ref)
	store.Close()
	_, gone := open(t, Config{}).Pull(t.Context(), ref, PullOptions{})
	wantError(t, gone, errdefs.IsUnavailable, ref)
	for what, text := range map[string]string{"error": err.Error(), "network error": gone.Error(), "log": log.String()} {
		if strings.Contains(text, "topsecret") {
			t.Errorf("the %s has the signature: %s", what, text)
		}
	}
}

// TestManifestsWithoutType: static files behind a web server have no manifest's Content-Type. The document says what it is.
func TestManifestsWithoutType(t *testing.T) {
	reg := newRegistry(t)
	m := raw(t, tarOf(t, file("a", "")))
	m.push(t, reg, "named")
	m.manifest.MediaType = ""
	m.push(t, reg, "unnamed")
	m.manifest.MediaType = ocispec.MediaTypeImageIndex
	reg.pushRaw(t, "lying", "1", ocispec.MediaTypeImageManifest, m.manifest, m.blobs...)
	for _, given := range []string{"", "application/octet-stream", "application/json", "application/json; charset=utf-8", "text/plain"} {
		reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") || r.Header.Get("User-Agent") != "tripod" {
				return false
			}
			resp, err := http.Get(reg.URL + r.URL.Path)
			if err != nil {
				t.Error(err)
				return true
			}
			defer resp.Body.Close()
			w.Header()["Content-Type"] = nil
			if given != "" {
				w.Header().Set("Content-Type", given)
			}
			w.WriteHeader(resp.StatusCode)
			if r.Method == http.MethodGet {
				var body bytes.Buffer
				_, _ = body.ReadFrom(resp.Body)
				_, _ = w.Write(body.Bytes())
			}
			return true
		})
		for _, name := range []string{"named", "unnamed"} {
			if img, err := open(t, Config{}).Pull(t.Context(), reg.ref(name+":1"), PullOptions{}); err != nil || img.Kind != KindRootfs {
				t.Errorf("%s with the type %q: got %+v, %v", name, given, img, err)
			}
		}
		if _, err := open(t, Config{}).Pull(t.Context(), reg.ref("lying:1"), PullOptions{}); err == nil {
			t.Errorf("a manifest that says that it is an index, with the type %q: pulled", given)
		}
	}
}

// oddMirrors returns mirrors of a registry that answer less or other than they should.
func oddMirrors(t testing.TB, reg *testRegistry) map[string]http.HandlerFunc {
	page := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<html>Please log in</html>")
	}
	mirrors := map[string]http.HandlerFunc{"a page": page, "other bytes": func(w http.ResponseWriter, r *http.Request) {
		resp, err := http.Get(reg.URL + r.URL.Path)
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		if strings.Contains(r.URL.Path, "/blobs/") {
			body = bytes.Repeat([]byte("?"), len(body))
		}
		w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
		w.Header().Set("Docker-Content-Digest", resp.Header.Get("Docker-Content-Digest"))
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		_, _ = w.Write(body)
	}}
	for what, blobs := range map[string]http.HandlerFunc{
		"an error":  func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		"not found": http.NotFound,
		"a page":    page,
		"nothing":   func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		mirrors[what+" for blobs"] = func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "/blobs/") {
				blobs(w, r)
			} else {
				reg.Config.Handler.ServeHTTP(w, r)
			}
		}
	}
	return mirrors
}

// mirrorToml is a hosts.toml with a registry and a mirror before it.
const mirrorToml = "server = %q\n[host.%q]\n  capabilities = [\"pull\", \"resolve\"]\n"

// TestMirrorThatIsNone: a mirror that answers a page instead of a manifest is passed over, and named if nothing else answers.
func TestMirrorThatIsNone(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", oneFileImage(t, "x"))
	mirrors := oddMirrors(t, reg)
	page, garbage := httptest.NewServer(mirrors["a page"]), httptest.NewServer(mirrors["other bytes"])
	defer page.Close()
	defer garbage.Close()
	var log bytes.Buffer
	dir := hostsToml(t, "registry.example", fmt.Sprintf(mirrorToml, reg.URL, garbage.URL))
	pull(t, open(t, Config{HostsDir: []string{dir}, Logger: slog.New(slog.NewTextHandler(&log, nil))}), "registry.example/app:1")
	reg.push(t, "org/manifests/app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2")), tarOf(t, file("c", "3"))))
	pull(t, open(t, Config{HostsDir: []string{dir}}), "registry.example/org/manifests/app:1") // several blobs at a time
	if name := strings.TrimPrefix(garbage.URL, "http://"); !strings.Contains(log.String(), "mirror="+name) {
		t.Errorf("log: got %q, want the mirror %s", log.String(), name)
	}
	alone := hostsToml(t, "registry.example", fmt.Sprintf(mirrorToml, page.URL, page.URL))
	_, err := open(t, Config{HostsDir: []string{alone}}).Pull(t.Context(), "registry.example/app:1", PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, strings.TrimPrefix(page.URL, "http://"), "text/html")
}

// TestUnreadableLogin: an entry of the docker config that cannot be read is named in the log.
func TestUnreadableLogin(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.json")
	check(t, os.WriteFile(config, []byte(`{"auths": {"broken.example": {"auth": "%%%"}}}`), 0o600))
	reg := newRegistry(t)
	reg.push(t, "app:1", oneFileImage(t, "x"))
	var log bytes.Buffer
	pull(t, open(t, Config{DockerConfig: config, Logger: slog.New(slog.NewTextHandler(&log, nil))}), reg.ref("app:1"))
	if !strings.Contains(log.String(), "broken.example") {
		t.Errorf("log: got %q, want a warning about broken.example", log.String())
	}
}

// TestManifestWithoutAnswer: a registry that breaks off when it is asked for a manifest is unavailable, although it has no blob with
// the manifest's digest, which is what containerd asks for next.
func TestManifestWithoutAnswer(t *testing.T) {
	reg := newRegistry(t)
	img := pull(t, open(t, Config{}), reg.push(t, "app:1", oneFileImage(t, "x")))
	for what, requests := range map[string]string{"GET and HEAD": "", "HEAD": http.MethodHead} {
		reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			switch {
			case strings.Contains(r.URL.Path, "/manifests/") && strings.HasPrefix(r.Method, requests):
				conn, _, err := w.(http.Hijacker).Hijack()
				check(t, err)
				check(t, conn.Close())
			case strings.Contains(r.URL.Path, "/blobs/"):
				http.NotFound(w, r)
			default:
				return false
			}
			return true
		})
		_, err := open(t, Config{}).Pull(t.Context(), img.RepoDigests[0], PullOptions{})
		if !errdefs.IsUnavailable(err) {
			t.Errorf("%s broken off: got %v, want Unavailable", what, err)
		}
	}
	reg.setHook(nil)
	_, err := open(t, Config{}).Pull(t.Context(), reg.ref("app@sha256:"+strings.Repeat("0", 64)), PullOptions{})
	wantError(t, err, errdefs.IsNotFound)
}

// TestSeveralChallenges: a registry offers several ways to log in, in one header or in several.
func TestSeveralChallenges(t *testing.T) {
	reg := newRegistry(t)
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	tokens := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"token":"granted","access_token":"granted"}`)
	}))
	defer tokens.Close()
	bearer := fmt.Sprintf(`Bearer realm=%q,service="a, Basic b",scope="repository:app:pull"`, tokens.URL)
	for _, c := range []struct {
		headers []string
		auth    *registry.Auth
	}{
		{[]string{`Basic realm="r", ` + bearer}, nil},
		{[]string{bearer + `, Basic realm="r"`}, nil},
		{[]string{`Basic realm="r"`, bearer}, nil},
		{[]string{`Negotiate, ` + bearer}, nil},
		{[]string{`Negotiate, Basic realm="r \", x"`}, &registry.Auth{Username: "me", Password: "secret"}},
		{[]string{`Negotiate YII=, Basic realm="r"`}, &registry.Auth{Username: "me", Password: "secret"}},
		{[]string{`Negotiate`, `BASIC realm="r"`}, &registry.Auth{Username: "me", Password: "secret"}},
	} {
		reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			if _, password, ok := r.BasicAuth(); ok && password == "secret" || r.Header.Get("Authorization") == "Bearer granted" {
				return false
			}
			w.Header()["Www-Authenticate"] = c.headers
			w.WriteHeader(http.StatusUnauthorized)
			return true
		})
		if _, err := open(t, Config{}).Pull(t.Context(), ref, PullOptions{Auth: c.auth}); err != nil {
			t.Errorf("%q: %v", c.headers, err)
		}
	}
}

// encode makes a registry compress its answers on the way, so that their length is not that of the content.
func encode(t testing.TB, reg *testRegistry) {
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || r.URL.Path == "/v2/" || !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
			return false
		}
		r.Header.Del("Accept-Encoding")
		plain := httptest.NewRecorder()
		reg.Config.Handler.ServeHTTP(plain, r)
		encoded := compressGzip(t, plain.Body.Bytes())
		maps.Copy(w.Header(), plain.Header())
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Length", strconv.Itoa(len(encoded)))
		w.WriteHeader(plain.Code)
		_, _ = w.Write(encoded)
		return true
	})
}

// TestEncodedAnswers: the digest decides, whatever the length of the answer is.
func TestEncodedAnswers(t *testing.T) {
	reg := newRegistry(t)
	ref := reg.push(t, "app:1", oneFileImage(t, strings.Repeat("x", 1<<16)))
	encode(t, reg)
	pull(t, open(t, Config{}), ref)
	pull(t, open(t, Config{RangesPerBlob: 4}), ref)
}

// TestMirrorWithoutBlobs: a mirror has nothing of an image, or its manifest and not its blobs.
func TestMirrorWithoutBlobs(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", oneFileImage(t, "x"))
	for what, answers := range oddMirrors(t, reg) {
		mirror := httptest.NewServer(answers)
		defer mirror.Close()
		dir := hostsToml(t, "registry.example", fmt.Sprintf(mirrorToml, reg.URL, mirror.URL))
		if _, err := open(t, Config{HostsDir: []string{dir}}).Pull(t.Context(), "registry.example/app:1", PullOptions{}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
