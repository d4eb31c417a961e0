package image

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// fileServer serves files and records requests.
type fileServer struct {
	*httptest.Server
	mu       sync.Mutex
	files    map[string][]byte
	etags    map[string]string // "-" for none
	requests []*http.Request
	sent     atomic.Int64
	hook     func(w http.ResponseWriter, r *http.Request) bool
}

func newFiles(t testing.TB) *fileServer {
	t.Helper()
	s := &fileServer{files: map[string][]byte{}, etags: map[string]string{}}
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(s.Close)
	return s
}

func (s *fileServer) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	data, ok := s.files[r.URL.Path]
	etag := s.etags[r.URL.Path]
	hook := s.hook
	s.requests = append(s.requests, r)
	s.mu.Unlock()
	if hook != nil && hook(w, r) {
		return
	}
	if !ok {
		http.NotFound(w, r)
		return
	}
	modified := testTime
	if etag == "-" {
		modified = time.Time{}
	} else if etag != "" {
		w.Header().Set("ETag", etag)
	}
	http.ServeContent(&countingWriter{w, &s.sent}, r, "", modified, bytes.NewReader(data))
}

type countingWriter struct {
	http.ResponseWriter
	n *atomic.Int64
}

func (w *countingWriter) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	w.n.Add(int64(n))
	return n, err
}

func (s *fileServer) put(path string, data []byte, etag string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[path], s.etags[path] = data, etag
}

func (s *fileServer) setHook(hook func(w http.ResponseWriter, r *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hook = hook
}

// asked returns the requests since the last call.
func (s *fileServer) asked() []*http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.requests
	s.requests = nil
	return all
}

// translations maps every name to a path on the server.
func (s *fileServer) translations(t testing.TB) Translation {
	t.Helper()
	return rules(t, fmt.Sprintf("translations:\n- regexp: '^(.*)$'\n  url: '%s/$1'\n", s.URL))
}

func rules(t testing.TB, text string) Translation {
	t.Helper()
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, "rules.yaml"), []byte(text), 0o600))
	return Translation{Prefix: "virtlet.cloud/", Dir: dir}
}

// randomBytes returns an incompressible raw disk of n bytes.
func randomBytes(t testing.TB, n int) []byte {
	t.Helper()
	data := make([]byte, n)
	_, err := rand.Read(data)
	check(t, err)
	return data
}

// breaking returns a hook that serves the first bytes of a file and then breaks the connection, n times.
func (s *fileServer) breaking(path string, bytes int, n *atomic.Int32) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != path || n.Add(-1) < 0 {
			return false
		}
		defer panic(http.ErrAbortHandler)
		s.mu.Lock()
		data, etag := s.files[path], s.etags[path]
		s.mu.Unlock()
		if etag != "-" {
			w.Header().Set("ETag", etag)
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(data)))
		_, _ = w.Write(data[:bytes])
		s.sent.Add(int64(bytes))
		w.(http.Flusher).Flush()
		return true
	}
}
