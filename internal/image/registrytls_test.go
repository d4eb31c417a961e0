package image

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/tripod-run/tripod/internal/image/registry"
)

// overTLS serves a registry with TLS too, as registry.example. It returns the directory for registry.Config.HostsDir, and the host.
func overTLS(t testing.TB, reg *testRegistry, more string) (dir, host string) {
	t.Helper()
	server := httptest.NewTLSServer(reg.Config.Handler)
	t.Cleanup(server.Close)
	dir = hostsToml(t, "registry.example", fmt.Sprintf("server = %q\nskip_verify = true\n%s", server.URL, more))
	return dir, strings.TrimPrefix(server.URL, "https://")
}

// newUploads makes a registry name another server, which has no TLS, for uploads over TLS. What arrives there gets into the registry.
func newUploads(t testing.TB, reg *testRegistry) *spy {
	t.Helper()
	plain := newSpy(t, func(w http.ResponseWriter, r *http.Request) {
		blob, err := io.ReadAll(r.Body)
		if err != nil || r.Method != http.MethodPut || r.Header.Get("Content-Type") == "" || r.URL.Query().Get("_state") != "topsecret" {
			t.Errorf("upload: got %s %s with %v, %v", r.Method, r.URL, r.Header, err)
		}
		reg.put(t, http.MethodPost, "/v2/app/blobs/uploads/?digest="+r.URL.Query().Get("digest"), "application/octet-stream", blob)
		w.WriteHeader(http.StatusCreated)
	})
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.TLS != nil && r.Header.Get("Authorization") == "" {
			challenge(w, r)
			return true
		}
		if r.TLS == nil || r.Method != http.MethodPost {
			return false
		}
		w.Header().Set("Location", plain.URL+"/v2/app/blobs/uploads/1?_state=topsecret")
		w.WriteHeader(http.StatusAccepted)
		return true
	})
	return plain
}

// TestUploadsWithoutTLS: a registry behind a proxy for TLS often names its own address without TLS for uploads. The upload goes
// there without a login, after a warning, or is refused.
func TestUploadsWithoutTLS(t *testing.T) {
	reg := newRegistry(t)
	plain := newUploads(t, reg)
	dir, _ := overTLS(t, reg, "[header]\nX-Secret = \"s\"\n")
	m := raw(t, tarOf(t, file("a", "b")))
	manifest, layer, config := NewBlob(m.manifest.MediaType, []byte(`{"schemaVersion": 2}`)),
		NewBlob(m.manifest.Layers[0].MediaType, m.blobs[0]), NewBlob(m.manifest.Config.MediaType, m.blobs[1])
	var text bytes.Buffer
	ctx := log.WithLogger(t.Context(), bridge(slog.New(slog.NewTextHandler(&text, nil))))
	login := &registry.Auth{RegistryToken: "token"}
	name := strings.TrimPrefix(plain.URL, "http://")

	_, err := Push(ctx, registry.Config{HostsDir: []string{dir}, RefuseDowngrades: true}, "registry.example/app:1", login, nil, manifest,
		layer, config)
	wantError(t, err, errdefs.IsFailedPrecondition, "http://"+name, "refuse_downgrades")
	if plain.hits != 0 || text.Len() > 0 {
		t.Errorf("a refused upload: got %d requests and the log %q, want none", plain.hits, text.String())
	}
	_, err = Push(ctx, registry.Config{HostsDir: []string{dir}}, "registry.example/app:1", login, nil, manifest, layer, config)
	check(t, err)
	plain.check(t, true)
	if got := text.String(); strings.Count(got, "level=WARN") != 1 || !strings.Contains(got, "host="+name) ||
		strings.Contains(got, "topsecret") {
		t.Errorf("log: got %q, want one warning with the host %s and without the query", got, name)
	}
	if plain.hits != 2 || reg.count("PUT", "/manifests/1") != 1 {
		t.Errorf("got %d uploads and %d manifests, want 2 and 1", plain.hits, reg.count("PUT", "/manifests/1"))
	}
}

// TestUploadsElsewhere: what belongs to the registry does not go with an upload to another host.
func TestUploadsElsewhere(t *testing.T) {
	reg := newRegistry(t)
	other := newSpy(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) })
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return false
		}
		w.Header().Set("Location", other.URL+"/upload")
		w.WriteHeader(http.StatusAccepted)
		return true
	})
	dir := hostsToml(t, "registry.example", fmt.Sprintf("server = %q\n[header]\nX-Secret = \"s\"\n", reg.URL))
	_, err := Push(t.Context(), registry.Config{HostsDir: []string{dir}}, "registry.example/app:1", &registry.Auth{RegistryToken: "token"},
		nil,
		NewBlob("application/vnd.oci.image.manifest.v1+json", []byte(`{"schemaVersion": 2}`)), NewBlob("text/plain", []byte("x")))
	check(t, err)
	other.check(t, true)
}

// newTokens makes a registry name a token server that has no TLS.
func newTokens(t testing.TB, reg *testRegistry) *spy {
	tokens := newSpy(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"token":"granted","access_token":"granted"}`)
	})
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.TLS == nil || r.Header.Get("Authorization") == "Bearer granted" {
			return false
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf("Bearer realm=%q,service=test", tokens.URL+"/token?key=topsecret"))
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	return tokens
}

// TestTokenServerWithoutTLS: a registry with TLS names a token server without. No login goes there.
func TestTokenServerWithoutTLS(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", oneFileImage(t, "x"))
	tokens := newTokens(t, reg)
	dir, host := overTLS(t, reg, "")
	withHeader, _ := overTLS(t, reg, "[header]\nX-Secret = \"s\"\n")
	name := strings.TrimPrefix(tokens.URL, "http://")
	for what, c := range map[string]struct {
		cfg  Config
		auth *registry.Auth
		word string
	}{
		"password":       {Config{HostsDir: []string{dir}}, &registry.Auth{Username: "me", Password: "secret"}, "wants the login"},
		"identity token": {Config{HostsDir: []string{dir}}, &registry.Auth{IdentityToken: "secret"}, "wants the login"},
		"header":         {Config{HostsDir: []string{withHeader}}, nil, "wants the login"},
		"refused":        {Config{HostsDir: []string{dir}, RefuseDowngrades: true}, nil, "refuse_downgrades"},
	} {
		_, err := open(t, c.cfg).Pull(t.Context(), "registry.example/app:1", PullOptions{Auth: c.auth})
		wantError(t, err, errdefs.IsFailedPrecondition, "http://"+name, c.word)
		if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: error %q contains a secret", what, err)
		}
	}
	if tokens.hits > 0 {
		t.Errorf("the token server got %d requests with %q, want none", tokens.hits, tokens.seen)
	}
	var text bytes.Buffer
	pull(t, open(t, Config{HostsDir: []string{dir}, Logger: slog.New(slog.NewTextHandler(&text, nil))}), "registry.example/app:1")
	if got := text.String(); strings.Count(got, "level=WARN") != 1 || !strings.Contains(got, "registry="+host) ||
		!strings.Contains(got, "host="+name) || strings.Contains(got, "topsecret") {
		t.Errorf("log: got %q, want one warning with %s and %s and without the query", got, host, name)
	}
}

// newBlobStore makes a registry redirect from TLS to a server with its blobs that has no TLS.
func newBlobStore(t testing.TB, reg *testRegistry) *spy {
	plain := newSpy(t, reg.Config.Handler.ServeHTTP)
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.TLS == nil || !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		http.Redirect(w, r, plain.URL+r.URL.Path+"?sig=topsecret", http.StatusTemporaryRedirect)
		return true
	})
	return plain
}

// TestRedirectToHTTP: a blob's redirect from TLS to http is refused, also by a registry on loopback.
func TestRedirectToHTTP(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", oneFileImage(t, "x"))
	plain := newBlobStore(t, reg)
	dir, _ := overTLS(t, reg, "")
	_, err := open(t, Config{HostsDir: []string{dir}}).Pull(t.Context(), "registry.example/app:1", PullOptions{})
	wantError(t, err, errdefs.IsFailedPrecondition, plain.URL, "redirect refused")
	if plain.hits != 0 || strings.Contains(err.Error(), "topsecret") {
		t.Errorf("got %d requests and %v, want none, and no query", plain.hits, err)
	}
}
