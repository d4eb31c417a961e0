package attack

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/test/harness"
)

// origin is a registry that serves any content, even invalid content, as images of origin.test.
type origin struct {
	server *httptest.Server
	dir    string // of hosts.toml files

	mu    sync.Mutex
	files map[string]file // by request path
}

type file struct {
	kind string
	data []byte
}

func newOrigin(t *testing.T) *origin {
	t.Helper()
	o := &origin{dir: t.TempDir(), files: map[string]file{}}
	o.server = httptest.NewServer(o)
	t.Cleanup(o.server.Close)
	hostsFile(t, o.dir, "origin.test", o.server.URL)
	return o
}

// option makes a daemon pull the origin's images from it, and other images from the usual registry.
func (o *origin) option(t *testing.T) harness.Option {
	return harness.Set("image.hosts_dirs", []string{o.dir, harness.Registry(t).HostsDir})
}

func (o *origin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.mu.Lock()
	f, ok := o.files[r.URL.Path]
	o.mu.Unlock()
	if !ok && r.URL.Path != "/v2/" {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", f.kind)
	w.Header().Set("Docker-Content-Digest", digest.FromBytes(f.data).String())
	_, _ = w.Write(f.data)
}

func (o *origin) add(repository, kind string, data []byte) v1.Descriptor {
	o.mu.Lock()
	defer o.mu.Unlock()
	d := v1.Descriptor{MediaType: kind, Digest: digest.FromBytes(data), Size: int64(len(data))}
	for _, sort := range []string{"blobs", "manifests"} {
		o.files["/v2/"+repository+"/"+sort+"/"+d.Digest.String()] = file{kind, data}
	}
	return d
}

func (o *origin) tag(repository string, d v1.Descriptor) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.files["/v2/"+repository+"/manifests/1"] = o.files["/v2/"+repository+"/manifests/"+d.Digest.String()]
	return "origin.test/" + repository + ":1"
}

// push creates an image of one layer and returns its reference.
func (o *origin) push(t *testing.T, repository string, layer []byte) string {
	t.Helper()
	unpacked := digest.FromString("not known")
	if r, err := gzip.NewReader(bytes.NewReader(layer)); err == nil {
		if all, err := io.ReadAll(io.LimitReader(r, 1<<20)); err == nil {
			unpacked = digest.FromBytes(all)
		}
	}
	config := o.add(repository, v1.MediaTypeImageConfig, encode(t, v1.Image{
		Platform: v1.Platform{OS: "linux", Architecture: "amd64"}, RootFS: v1.RootFS{Type: "layers", DiffIDs: []digest.Digest{unpacked}},
	}))
	manifest := v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest, Config: config,
		Layers: []v1.Descriptor{o.add(repository, v1.MediaTypeImageLayerGzip, layer)},
	}
	return o.tag(repository, o.add(repository, v1.MediaTypeImageManifest, encode(t, manifest)))
}

// pushNested creates an image of a thousand nested indices and returns its reference.
func (o *origin) pushNested(t *testing.T) string {
	t.Helper()
	d := o.add("nested", v1.MediaTypeImageIndex,
		encode(t, v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex}))
	for range 1000 {
		d = o.add("nested", v1.MediaTypeImageIndex, encode(t, v1.Index{
			Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{d},
		}))
	}
	return o.tag("nested", d)
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestRegistry: a registry, or a server to which it redirects, can send anything and must not learn credentials for
// other hosts.
func TestRegistry(t *testing.T) {
	dir := t.TempDir()
	var thief atomic.Bool
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			thief.Store(true)
		}
		_, _ = io.WriteString(w, `{"token":"stolen"}`)
	}))
	t.Cleanup(other.Close)
	endless := func(w http.ResponseWriter, r *http.Request, kind string) {
		w.Header().Set("Content-Type", kind)
		for junk := []byte(strings.Repeat(" ", 1<<16)); r.Context().Err() == nil; {
			if _, err := w.Write(junk); err != nil || r.Method == http.MethodHead {
				return
			}
		}
	}
	manifest := func(w http.ResponseWriter, size int64) {
		d := digest.FromString("there is no such content")
		w.Header().Set("Content-Type", v1.MediaTypeImageManifest)
		fmt.Fprintf(w, `{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":%q,"digest":%q,"size":%d},"layers":[]}`,
			v1.MediaTypeImageManifest, v1.MediaTypeImageConfig, d, size)
	}
	blob := func(r *http.Request) bool { return strings.Contains(r.URL.Path, "/blobs/") }
	servers := map[string]http.HandlerFunc{
		"silent":           func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"endless-manifest": func(w http.ResponseWriter, r *http.Request) { endless(w, r, v1.MediaTypeImageManifest) },
		"endless-blob": func(w http.ResponseWriter, r *http.Request) {
			if !blob(r) {
				manifest(w, 100)
				return
			}
			endless(w, r, "application/octet-stream")
		},
		"size-of-all-disks": func(w http.ResponseWriter, r *http.Request) {
			if !blob(r) {
				manifest(w, 1<<62)
				return
			}
			endless(w, r, "application/octet-stream")
		},
		"size-below-zero": func(w http.ResponseWriter, r *http.Request) {
			if !blob(r) {
				manifest(w, -1)
				return
			}
			endless(w, r, "application/octet-stream")
		},
		"circle": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, r.URL.Path, http.StatusTemporaryRedirect)
		},
		"headers": func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X-Bomb", strings.Repeat("x", 20<<20)) },
		"resets": func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				_ = conn.Close()
			}
		},
		"login-elsewhere": func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") == "" || blob(r) {
				w.Header().Set("WWW-Authenticate", `Bearer realm="`+other.URL+`/token",service="x"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			http.Redirect(w, r, other.URL+r.URL.Path, http.StatusTemporaryRedirect)
		},
	}
	running := map[string]*httptest.Server{}
	for name, serve := range servers {
		s := httptest.NewServer(serve)
		t.Cleanup(s.Close)
		hostsFile(t, dir, name+".test", s.URL)
		running[name] = s
	}
	g := open(t, harness.Set("image.hosts_dirs", []string{dir, harness.Registry(t).HostsDir}),
		harness.Set("image.pull_progress_timeout", "1s"))
	for name, s := range running {
		g.attack(name, func(t *testing.T) {
			t.Cleanup(s.CloseClientConnections)
			t.Cleanup(other.CloseClientConnections)
			_, err := g.d.ImageCRI().PullImage(t.Context(), &runtimeapi.PullImageRequest{
				Image: &runtimeapi.ImageSpec{Image: name + ".test/image:1"},
				Auth:  &runtimeapi.AuthConfig{Username: "user", Password: "secret", ServerAddress: name + ".test"},
			})
			// A kubelet recognises an unavailable registry by the error's name, not by its code.
			if code, named := status.Code(err), strings.Contains(fmt.Sprint(err), crierrors.ErrRegistryUnavailable.Error()); code == codes.OK ||
				(code == codes.Unknown || code == codes.Internal) && !named {
				t.Errorf("PullImage: got error %v, want another code than Unknown and Internal, or %v", err, crierrors.ErrRegistryUnavailable)
			}
		})
	}
	if thief.Load() {
		t.Error("the daemon sent a password to another host")
	}
	if log := g.d.DaemonLog(); strings.Contains(log, "secret") {
		t.Error("the daemon's log contains the password")
	}
	if left, err := filepath.Glob(filepath.Join(g.d.Root, "*/ingest/*")); err != nil || len(left) > 0 {
		t.Errorf("files left by pulls: got %v, error %v; want none", left, err)
	}
}
