package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/test/until"
)

// testRegistry is a registry on loopback that counts requests and can misbehave.
type testRegistry struct {
	*httptest.Server
	host string

	mu       sync.Mutex
	requests map[string]int
	headers  map[string]http.Header
	// hook may answer a request instead of the registry; it then returns true.
	hook func(w http.ResponseWriter, r *http.Request) bool
}

func newRegistry(t testing.TB) *testRegistry {
	t.Helper()
	reg := &testRegistry{requests: map[string]int{}, headers: map[string]http.Header{}}
	store := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	reg.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reg.mu.Lock()
		line := r.Method + " " + r.URL.Path
		reg.requests[line]++
		reg.headers[line] = r.Header.Clone()
		hook := reg.hook
		reg.mu.Unlock()
		if hook == nil || !hook(w, r) {
			store.ServeHTTP(w, r)
		}
	}))
	reg.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(reg.Close)
	reg.host = strings.TrimPrefix(reg.URL, "http://")
	return reg
}

func (r *testRegistry) setHook(hook func(w http.ResponseWriter, r *http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook = hook
}

// count returns the number of requests so far whose "METHOD /path" contains all parts.
func (r *testRegistry) count(parts ...string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	sum := 0
	for line, n := range r.requests {
		fits := true
		for _, part := range parts {
			fits = fits && strings.Contains(line, part)
		}
		if fits {
			sum += n
		}
	}
	return sum
}

func (r *testRegistry) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.requests)
	clear(r.headers)
}

// ref returns the reference of repo:tag in this registry.
func (r *testRegistry) ref(repo string) string { return r.host + "/" + repo }

func (r *testRegistry) push(t testing.TB, repo string, what remote.Taggable) string {
	t.Helper()
	ref, err := name.ParseReference(r.ref(repo))
	check(t, err)
	switch what := what.(type) {
	case v1.Image:
		err = remote.Write(ref, what)
	case v1.ImageIndex:
		err = remote.WriteIndex(ref, what)
	default:
		t.Fatalf("push: unexpected type %T", what)
	}
	check(t, err)
	r.forget()
	return ref.String()
}

// pushRaw uploads blobs and a manifest unchecked.
func (r *testRegistry) pushRaw(t testing.TB, repo, tag, mediaType string, manifest any, blobs ...[]byte) string {
	t.Helper()
	for _, blob := range blobs {
		r.put(t, http.MethodPost, fmt.Sprintf("/v2/%s/blobs/uploads/?digest=%s", repo, digest.FromBytes(blob)), "application/octet-stream", blob)
	}
	document, err := json.Marshal(manifest)
	check(t, err)
	r.put(t, http.MethodPut, fmt.Sprintf("/v2/%s/manifests/%s", repo, tag), mediaType, document)
	r.forget()
	return r.ref(repo + ":" + tag)
}

func (r *testRegistry) put(t testing.TB, method, path, mediaType string, body []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, r.URL+path, bytes.NewReader(body))
	check(t, err)
	req.Header.Set("Content-Type", mediaType)
	resp, err := http.DefaultClient.Do(req)
	check(t, err)
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		text, _ := io.ReadAll(resp.Body)
		t.Fatalf("%s %s: %s: %s", method, path, resp.Status, text)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// testLogger returns a logger whose lines show only if the test fails.
func testLogger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Output().Write(p)
	return len(p), nil
}

// open opens a store that closes with the test.
func open(t testing.TB, cfg Config) *Store {
	t.Helper()
	if cfg.Root == "" {
		cfg.Root = filepath.Join(t.TempDir(), "image")
	}
	if cfg.Logger == nil {
		cfg.Logger = testLogger(t)
	}
	s, err := Open(t.Context(), cfg)
	check(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the store: %v", err)
		}
	})
	return s
}

func pull(t testing.TB, s *Store, ref string) Image {
	t.Helper()
	img, err := s.Pull(t.Context(), ref, PullOptions{})
	check(t, err)
	return img
}

// file returns a tar entry of a regular file.
func file(name, text string) entryOf {
	return entryOf{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(text))}, body: text}
}

type entryOf struct {
	tar.Header
	body string
}

func tarOf(t testing.TB, entries ...entryOf) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		check(t, w.WriteHeader(&e.Header))
		_, err := io.WriteString(w, e.body)
		check(t, err)
	}
	check(t, w.Close())
	return b.Bytes()
}

func compressGzip(t testing.TB, plain []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write(plain)
	check(t, err)
	check(t, w.Close())
	return b.Bytes()
}

// imageOf makes an image with one uncompressed layer per tar archive.
func imageOf(t testing.TB, config v1.Config, layers ...[]byte) v1.Image {
	t.Helper()
	img := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	for _, layer := range layers {
		var err error
		img, err = mutate.Append(img,
			mutate.Addendum{Layer: static.NewLayer(layer, types.OCIUncompressedLayer), MediaType: types.OCIUncompressedLayer})
		check(t, err)
	}
	file, err := img.ConfigFile()
	check(t, err)
	file = file.DeepCopy()
	file.Config, file.OS, file.Architecture = config, "linux", "amd64"
	img, err = mutate.ConfigFile(img, file)
	check(t, err)
	return img
}

// oneFileImage returns an image with one file.
func oneFileImage(t testing.TB, text string) v1.Image {
	return imageOf(t, v1.Config{Cmd: []string{"/bin/true"}}, tarOf(t, file("etc/text", text)))
}

// rawImage is a manifest with its blobs, for images that no library would make.
type rawImage struct {
	manifest ocispec.Manifest
	blobs    [][]byte
}

// raw builds an image of gzipped layers around tar archives.
func raw(t testing.TB, archives ...[]byte) *rawImage {
	t.Helper()
	config := ocispec.Image{Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"}, RootFS: ocispec.RootFS{Type: "layers"}}
	m := &rawImage{}
	m.manifest.SchemaVersion = 2
	m.manifest.MediaType = ocispec.MediaTypeImageManifest
	for _, archive := range archives {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, digest.FromBytes(archive))
		m.manifest.Layers = append(m.manifest.Layers, m.add(ocispec.MediaTypeImageLayerGzip, compressGzip(t, archive)))
	}
	document, err := json.Marshal(config)
	check(t, err)
	m.manifest.Config = m.add(ocispec.MediaTypeImageConfig, document)
	return m
}

func (m *rawImage) add(mediaType string, blob []byte) ocispec.Descriptor {
	m.blobs = append(m.blobs, blob)
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(blob), Size: int64(len(blob))}
}

func (m *rawImage) push(t testing.TB, r *testRegistry, repo string) string {
	t.Helper()
	return r.pushRaw(t, repo, "1", ocispec.MediaTypeImageManifest, m.manifest, m.blobs...)
}

// pushAs uploads a document under its digest, after the blobs, and returns its entry for an index.
func (m *rawImage) pushAs(t testing.TB, r *testRegistry, repo, mediaType string, document any,
	platform *ocispec.Platform) ocispec.Descriptor {
	t.Helper()
	text, err := json.Marshal(document)
	check(t, err)
	r.pushRaw(t, repo, digest.FromBytes(text).String(), mediaType, document, m.blobs...)
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(text), Size: int64(len(text)), Platform: platform}
}

// mounted mounts a root filesystem for the duration of a test.
func mounted(t testing.TB, mounts []mount.Mount) string {
	t.Helper()
	dir := t.TempDir()
	check(t, mount.All(mounts, dir))
	t.Cleanup(func() {
		if err := mount.UnmountAll(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

func read(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	check(t, err)
	return string(b)
}

func blobPath(s *Store, dgst digest.Digest) string {
	return filepath.Join(s.cfg.Root, "content", "blobs", "sha256", dgst.Encoded())
}

// wantError checks an error's class and that its text contains all words.
func wantError(t testing.TB, err error, is func(error) bool, words ...string) {
	t.Helper()
	if err == nil || !is(err) {
		t.Fatalf("got error %v, want one of another class", err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not contain %q", err, word)
		}
	}
}

// eventually waits for a condition.
func eventually(t testing.TB, condition func() error) {
	t.Helper()
	until.NoError(t, 10*time.Second, condition)
}

var testTime = time.Unix(1_700_000_000, 0)

// findFile finds the only file of a name in a tree.
func findFile(t testing.TB, root, name string) string {
	t.Helper()
	var found []string
	check(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if filepath.Base(path) == name {
			found = append(found, path)
		}
		return err
	}))
	if len(found) != 1 {
		t.Fatalf("got %d files %s below %s, want 1", len(found), name, root)
	}
	return found[0]
}
