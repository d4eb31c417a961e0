package image

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image/registry"
)

// hostsToml writes a registry host's hosts.toml and returns the directory for Config.HostsDir.
func hostsToml(t testing.TB, host, text string) string {
	t.Helper()
	dir := t.TempDir()
	check(t, os.MkdirAll(filepath.Join(dir, host), 0o700))
	check(t, os.WriteFile(filepath.Join(dir, host, "hosts.toml"), []byte(text), 0o600))
	return dir
}

// guard makes a registry require basic authentication.
func (r *testRegistry) guard(username, password string) {
	r.setHook(func(w http.ResponseWriter, req *http.Request) bool {
		if u, p, ok := req.BasicAuth(); ok && u == username && p == password {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
}

func TestPullErrors(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	status := func(code int) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(code)
			return true
		}
	}
	for name, c := range map[string]struct {
		ref  string
		hook func(http.ResponseWriter, *http.Request) bool
		is   func(error) bool
	}{
		"unknown tag":        {ref: reg.ref("app:2"), is: errdefs.IsNotFound},
		"unknown repository": {ref: reg.ref("none:1"), is: errdefs.IsNotFound},
		"unknown digest":     {ref: reg.ref("app@sha256:" + strings.Repeat("0", 64)), is: errdefs.IsNotFound},
		"unauthorized":       {ref: ref, hook: status(401), is: errdefs.IsUnauthorized},
		"forbidden":          {ref: ref, hook: status(403), is: errdefs.IsPermissionDenied},
		"broken":             {ref: ref, hook: status(500), is: errdefs.IsUnavailable},
		"overloaded":         {ref: ref, hook: status(503), is: errdefs.IsUnavailable},
		"unreachable":        {ref: "127.0.0.1:1/app:1", is: errdefs.IsUnavailable},
		"no such host":       {ref: "registry.invalid/app:1", is: errdefs.IsUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			reg.setHook(c.hook)
			_, err := s.Pull(t.Context(), c.ref, PullOptions{})
			wantError(t, err, c.is, c.ref, strings.SplitN(c.ref, "/", 2)[0])
		})
	}
	reg.setHook(nil)
	for _, ref := range []string{"", "app/UPPER", "a:b:c", "app@sha256:12", strings.Repeat("a", 300)} {
		_, err := s.Pull(t.Context(), ref, PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, ref)
	}
}

func TestHostsTomlMirrors(t *testing.T) {
	reg, down := newRegistry(t), httptest.NewServer(http.NotFoundHandler())
	defer down.Close()
	src := oneFileImage(t, "x")
	reg.push(t, "app:1", src)
	mirrors := fmt.Sprintf("server = %q\n[host.%q]\ncapabilities = [\"pull\", \"resolve\"]\n[host.%q]\n", "https://upstream.invalid", down.URL,
		reg.URL)
	for _, host := range []string{"registry.example", "registry.example_5000_", "_default"} {
		s := open(t, Config{HostsDir: []string{t.TempDir(), hostsToml(t, host, mirrors)}})
		ref := "registry.example/app:1"
		if strings.Contains(host, "5000") {
			ref = "registry.example:5000/app:1"
		}
		if img := pull(t, s, ref); img.ID != idOf(t, src) || img.RepoTags[0] != ref {
			t.Errorf("%s: Pull() = %+v, want image %s with the tag %s", host, img, idOf(t, src), ref)
		}
	}
}

// Plain http is used only if hosts.toml says so, and for registries on loopback (containerd's rule).
func TestPlainHTTPOnlyWhereConfigured(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", oneFileImage(t, "x"))
	_, port, _ := strings.Cut(reg.host, ":")
	// This name is not literally loopback, but resolves to it.
	name := fmt.Sprintf("127.0.0.1.nip.invalid:%s", port)
	_, err := open(t, Config{}).Pull(t.Context(), name+"/app:1", PullOptions{})
	wantError(t, err, errdefs.IsUnavailable, name)
	dir := hostsToml(t, "127.0.0.1.nip.invalid_"+port+"_", fmt.Sprintf("server = %q\n", reg.URL))
	pull(t, open(t, Config{HostsDir: []string{dir}}), name+"/app:1")

	strict := hostsToml(t, "registry.example", fmt.Sprintf("server = %q\n", "https://"+reg.host))
	_, err = open(t, Config{HostsDir: []string{strict}}).Pull(t.Context(), "registry.example/app:1", PullOptions{})
	wantError(t, err, errdefs.IsUnavailable, "registry.example/app:1")
}

func TestLogins(t *testing.T) {
	reg := newRegistry(t)
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	reg.guard("me", "secret")
	config := filepath.Join(t.TempDir(), "config.json")
	check(t, os.WriteFile(config, fmt.Appendf(nil, `{"auths":{"http://%s/v2/":{"auth":%q}}}`, reg.host,
		base64.StdEncoding.EncodeToString([]byte("me:secret"))), 0o600))
	for name, c := range map[string]struct {
		auth *registry.Auth
		file string
		is   func(error) bool
	}{
		"username": {auth: &registry.Auth{Username: "me", Password: "secret"}},
		"encoded":  {auth: &registry.Auth{Auth: base64.StdEncoding.EncodeToString([]byte("me:secret"))}},
		"address":  {auth: &registry.Auth{Username: "me", Password: "secret", ServerAddress: "https://" + reg.host + "/v1/"}},
		"other address": {auth: &registry.Auth{Username: "me", Password: "secret", ServerAddress: "other.example"},
			is: errdefs.IsUnauthorized},
		"wrong password":      {auth: &registry.Auth{Username: "me", Password: "wrong"}, is: errdefs.IsUnauthorized},
		"nobody":              {is: errdefs.IsUnauthorized},
		"file":                {file: config},
		"request before file": {auth: &registry.Auth{Username: "me", Password: "wrong"}, file: config, is: errdefs.IsUnauthorized},
		"not base64":          {auth: &registry.Auth{Auth: "%%%"}, is: errdefs.IsInvalidArgument},
		"no such file":        {auth: &registry.Auth{Username: "me", Password: "secret"}, file: "/nonexistent"},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, Config{DockerConfig: c.file})
			_, err := s.Pull(t.Context(), ref, PullOptions{Auth: c.auth})
			if c.is == nil {
				check(t, err)
				return
			}
			wantError(t, err, c.is)
			if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "wrong") {
				t.Errorf("error %q contains the password", err)
			}
		})
	}
}

// A login that must not pull an image does not get it from the store either.
func TestLoginIsCheckedForStoredImages(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	reg.guard("me", "secret")
	_, err := s.Pull(t.Context(), ref, PullOptions{Auth: &registry.Auth{Username: "me", Password: "secret"}})
	check(t, err)
	_, err = s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsUnauthorized)
}

func TestTokens(t *testing.T) {
	reg := newRegistry(t)
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	var asked url.Values
	tokens := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		check(t, r.ParseForm())
		asked = r.Form
		fmt.Fprint(w, `{"token":"granted","access_token":"granted"}`)
	}))
	defer tokens.Close()
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") == "Bearer granted" {
			return false
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf("Bearer realm=%q,service=test,scope=\"repository:app:pull\"", tokens.URL))
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	_, err := open(t, Config{}).Pull(t.Context(), ref, PullOptions{Auth: &registry.Auth{IdentityToken: "identity"}})
	check(t, err)
	if asked.Get("grant_type") != "refresh_token" || asked.Get("refresh_token") != "identity" {
		t.Errorf("token request: got %v, want the identity token", asked)
	}
	asked = nil
	_, err = open(t, Config{}).Pull(t.Context(), ref, PullOptions{Auth: &registry.Auth{RegistryToken: "granted"}})
	check(t, err)
	if asked != nil {
		t.Errorf("token request with a registry token: got %v, want none", asked)
	}
}

// spy is a server that records credentials in any form.
type spy struct {
	*httptest.Server
	mu   sync.Mutex
	hits int
	seen []string
}

func newSpy(t testing.TB, serve http.HandlerFunc) *spy {
	s := &spy{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.hits++
		for _, name := range []string{"Authorization", "Cookie", "X-Secret", "Proxy-Authorization"} {
			if v := r.Header.Get(name); v != "" {
				s.seen = append(s.seen, name+": "+v)
			}
		}
		if r.ParseForm() == nil && len(r.PostForm) > 0 {
			s.seen = append(s.seen, "form: "+r.PostForm.Encode())
		}
		s.mu.Unlock()
		serve(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *spy) check(t testing.TB, wantHit bool) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.seen) > 0 {
		t.Errorf("another host received the credentials %q", s.seen)
	}
	if wantHit && s.hits == 0 {
		t.Error("the other host received no request, so the test proves nothing")
	}
}

func challenge(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("WWW-Authenticate", `Basic realm="give me"`)
	w.WriteHeader(http.StatusUnauthorized)
}

func TestFaultI4NoCredentialsToAnotherHost(t *testing.T) {
	login := &registry.Auth{Username: "me", Password: "secret"}
	t.Run("redirect", func(t *testing.T) {
		reg := newRegistry(t)
		ref := reg.push(t, "app:1", oneFileImage(t, "x"))
		blobs := newSpy(t, func(w http.ResponseWriter, r *http.Request) {
			// Serve the content to any client that has the URL, like blob storage behind a registry.
			req, _ := http.NewRequest(http.MethodGet, reg.URL+r.URL.Path, nil)
			req.SetBasicAuth("me", "secret")
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			_, _ = io.Copy(w, resp.Body)
		})
		guarded := func(w http.ResponseWriter, r *http.Request) bool {
			if u, p, ok := r.BasicAuth(); !ok || u != "me" || p != "secret" {
				challenge(w, r)
				return true
			}
			if strings.Contains(r.URL.Path, "/blobs/") && r.Header.Get("User-Agent") == "tripod" {
				http.Redirect(w, r, blobs.URL+r.URL.Path, http.StatusTemporaryRedirect)
				return true
			}
			return false
		}
		reg.setHook(guarded)
		_, err := open(t, Config{}).Pull(t.Context(), ref, PullOptions{Auth: login})
		check(t, err)
		blobs.check(t, true)

		// Headers from hosts.toml and registry tokens also belong to the registry alone.
		dir := hostsToml(t, strings.Replace(reg.host, ":", "_", 1)+"_", fmt.Sprintf("server = %q\n[header]\nX-Secret = \"s\"\n", reg.URL))
		_, err = open(t, Config{HostsDir: []string{dir}}).Pull(t.Context(), ref, PullOptions{Auth: login})
		check(t, err)
		blobs.check(t, true)
	})
	t.Run("redirect that challenges", func(t *testing.T) {
		reg := newRegistry(t)
		ref := reg.push(t, "app:1", oneFileImage(t, "x"))
		thief := newSpy(t, challenge)
		reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/blobs/") {
				return false
			}
			http.Redirect(w, r, thief.URL+r.URL.Path, http.StatusFound)
			return true
		})
		_, err := open(t, Config{}).Pull(t.Context(), ref, PullOptions{Auth: login})
		wantError(t, err, errdefs.IsUnauthorized)
		thief.check(t, true)
	})
	t.Run("mirror", func(t *testing.T) {
		reg := newRegistry(t)
		reg.push(t, "app:1", oneFileImage(t, "x"))
		thief := newSpy(t, challenge)
		dir := hostsToml(t, "registry.example", fmt.Sprintf("server = %q\n[host.%q]\n", reg.URL, thief.URL))
		reg.guard("me", "secret")
		_, err := open(t, Config{HostsDir: []string{dir}}).Pull(t.Context(), "registry.example/app:1", PullOptions{Auth: login})
		check(t, err)
		thief.check(t, true)
	})
	t.Run("foreign layer", func(t *testing.T) {
		reg, m := newRegistry(t), raw(t, tarOf(t, file("a", "b")))
		thief := newSpy(t, challenge)
		m.manifest.Layers[0].URLs = []string{thief.URL + "/layer"}
		pull(t, open(t, Config{}), m.push(t, reg, "app"))
		if thief.hits != 0 {
			t.Error("a URL in a manifest was requested")
		}
	})
}

func TestStalledPullEnds(t *testing.T) {
	reg := newRegistry(t)
	ref := reg.push(t, "app:1", oneFileImage(t, strings.Repeat("x", 1<<20)))
	stop := make(chan struct{})
	defer close(stop)
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		w.Header().Set("Content-Length", "1000")
		w.WriteHeader(http.StatusOK)
		_, _ = w.Write(make([]byte, 10))
		w.(http.Flusher).Flush()
		<-stop
		return true
	})
	s := open(t, Config{ProgressTimeout: 200 * time.Millisecond})
	start := time.Now()
	_, err := s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsUnavailable, "no progress for 200ms", ref)
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("the stalled pull took %v, want at most 5 s", took)
	}
	s = open(t, Config{PullTimeout: 200 * time.Millisecond})
	_, err = s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsUnavailable, "not complete after 200ms", ref)
}
