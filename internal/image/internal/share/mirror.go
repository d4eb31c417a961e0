package share

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/time/rate"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/tlsfile"
)

const (
	// mirrorChunk is the number of bytes that a transfer to a peer sends at a time.
	mirrorChunk = 64 << 10
	// mirrorStall ends a transfer to a peer that reads nothing for this long.
	mirrorStall = 30 * time.Second
)

// Config configures the mirror, which serves the store's images to peers.
type Config struct {
	// Address is HOST:PORT.
	Address string
	// Certificate and Key are files in PEM for HTTPS. They are read at each handshake. Without them the mirror serves
	// HTTP.
	Certificate, Key string
	// ClientCA is a file with authorities in PEM. If it is set, every peer must show a certificate from one of them.
	ClientCA string
	// Repositories are the prefixes of the images to serve, such as "registry.example.com/team"; empty means all.
	Repositories []string
	// Private also serves images that were pulled with a login.
	Private bool
	// Transfers limits the simultaneous transfers of blobs, and BytesPerSecond their rate together; 0 means no limit of
	// the rate.
	Transfers      int
	BytesPerSecond int
	// Limiter limits the connections.
	Limiter *connlimit.Limiter
}

// Images are the images of a node, as its store has them.
type Images interface {
	// Served returns the images that peers may read in a repository; private includes those that were pulled with a login.
	Served(ctx context.Context, repository reference.Named, private bool) []ServedImage
	// Blob returns the path of stored content, or an error if the content is not stored or damaged.
	Blob(ctx context.Context, desc ocispec.Descriptor) (path string, err error)
}

// Mirror serves the read part of the OCI distribution API from a store, for the peers of this node.
//
//	GET /v2/NAME/manifests/TAG-or-DIGEST?ns=REGISTRY     GET /v2/NAME/blobs/DIGEST?ns=REGISTRY
//
// A request must name the registry, as containerd's mirrors expect it. Content is served only under the names of images
// that the configuration allows: a digest alone opens nothing.
type Mirror struct {
	store     Images
	logger    *slog.Logger
	cfg       Config
	transfers chan struct{}
	rate      *rate.Limiter
	server    *http.Server
}

// Serve starts a mirror of a store. Close ends it.
func Serve(ctx context.Context, s Images, cfg Config, logger *slog.Logger) (*Mirror, error) {
	m := &Mirror{store: s, logger: logger, cfg: cfg, transfers: make(chan struct{}, cfg.Transfers)}
	if cfg.BytesPerSecond > 0 {
		m.rate = rate.NewLimiter(rate.Limit(cfg.BytesPerSecond), max(cfg.BytesPerSecond, mirrorChunk))
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("image mirror: %w: %w", err, errdefs.ErrUnavailable)
	}
	m.cfg.Address = l.Addr().String()
	m.server = cfg.Limiter.HTTPServer(m)
	m.server.ErrorLog = slog.NewLogLogger(logger.Handler(), slog.LevelDebug)
	serve := m.server.Serve
	if cfg.Certificate != "" {
		if m.server.TLSConfig, err = (tlsfile.Pair{Certificate: cfg.Certificate, Key: cfg.Key}).Server(cfg.ClientCA); err != nil {
			return nil, errors.Join(fmt.Errorf("image mirror: %w", err), l.Close())
		}
		serve = func(l net.Listener) error { return m.server.ServeTLS(l, "", "") }
	}
	go func() {
		if err := serve(cfg.Limiter.Listener(l)); !errors.Is(err, http.ErrServerClosed) {
			logger.Error("the image mirror failed", "err", err)
		}
	}()
	logger.Info("serving images to peers", "address", m.Address())
	return m, nil
}

// Address returns the HOST:PORT at which the mirror listens.
func (m *Mirror) Address() string { return m.cfg.Address }

// Close ends all transfers.
func (m *Mirror) Close() error { return m.server.Close() }

// ServeHTTP answers one request. Everything that the mirror does not have or does not serve is "not found".
func (m *Mirror) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	rest, ok := strings.CutPrefix(r.URL.Path, "/v2/")
	if ok && rest == "" {
		return
	}
	desc, err := m.find(r.Context(), r.URL.Query().Get("ns"), rest)
	if err == nil {
		err = m.send(w, r, desc)
	}
	switch {
	case err == nil:
	case errdefs.IsResourceExhausted(err):
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
	default:
		m.logger.DebugContext(r.Context(), "a peer asked for content that is not served", "path", r.URL.Path, "err", err)
		w.WriteHeader(http.StatusNotFound)
	}
}

// find returns the content that a path names.
func (m *Mirror) find(ctx context.Context, registry, path string) (ocispec.Descriptor, error) {
	for _, kind := range []string{"/manifests/", "/blobs/"} {
		at := strings.LastIndex(path, kind)
		if at < 0 {
			continue
		}
		repository, err := reference.WithName(registry + "/" + path[:at])
		if err != nil {
			return ocispec.Descriptor{}, failure.Invalidf("repository: %v", err)
		}
		if !m.allows(repository.Name()) {
			return ocispec.Descriptor{}, fmt.Errorf("%s is not configured to be served: %w", repository, errdefs.ErrNotFound)
		}
		what := path[at+len(kind):]
		for _, c := range m.store.Served(ctx, repository, m.cfg.Private) {
			if desc, ok := c.find(kind == "/blobs/", what); ok {
				return desc, nil
			}
		}
	}
	return ocispec.Descriptor{}, errdefs.ErrNotFound
}

// allows reports whether the configuration allows to serve a repository.
func (m *Mirror) allows(repository string) bool {
	return len(m.cfg.Repositories) == 0 || slices.ContainsFunc(m.cfg.Repositories, func(prefix string) bool {
		rest, ok := strings.CutPrefix(repository, strings.TrimSuffix(prefix, "/"))
		return ok && (rest == "" || rest[0] == '/')
	})
}

// ServedImage is an image under one of its names.
type ServedImage struct {
	// Tag is "" if the name has a digest.
	Tag string
	// Target is what the name refers to: the manifest, or an index that leads to it.
	Target, Manifest ocispec.Descriptor
	// Blobs are the config and the layers.
	Blobs []ocispec.Descriptor
}

// find returns the content of the image that a tag or a digest names.
func (i ServedImage) find(blob bool, what string) (ocispec.Descriptor, bool) {
	candidates := []ocispec.Descriptor{i.Target, i.Manifest}
	if blob {
		candidates = i.Blobs
	} else if what == i.Tag {
		return i.Target, true
	}
	for _, desc := range candidates {
		if desc.Digest.String() == what {
			return desc, true
		}
	}
	return ocispec.Descriptor{}, false
}

// send sends content with its digest as the validator, so that ranges work. The receiver checks the digest.
func (m *Mirror) send(w http.ResponseWriter, r *http.Request, desc ocispec.Descriptor) error {
	path, err := m.store.Blob(r.Context(), desc)
	if err != nil {
		return err
	}
	select {
	case m.transfers <- struct{}{}:
		defer func() { <-m.transfers }()
	default:
		return fmt.Errorf("%d transfers are under way: %w", cap(m.transfers), errdefs.ErrResourceExhausted)
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	h := w.Header()
	h.Set("Content-Type", desc.MediaType)
	h.Set("Docker-Content-Digest", desc.Digest.String())
	h.Set("ETag", strconv.Quote(desc.Digest.String()))
	http.ServeContent(&pacedWriter{w, r.Context(), m.rate}, r, "", time.Time{}, file)
	// The deadline of this transfer must not end the next one on the same connection. What is still buffered goes first.
	rest := http.NewResponseController(w)
	if rest.Flush() == nil {
		_ = rest.SetWriteDeadline(time.Time{})
	}
	return nil
}

// pacedWriter limits the rate of a transfer, and ends it if the peer reads nothing.
type pacedWriter struct {
	http.ResponseWriter
	ctx  context.Context
	rate *rate.Limiter
}

func (w *pacedWriter) Write(p []byte) (written int, err error) {
	for len(p) > 0 {
		n := min(len(p), mirrorChunk)
		if w.rate != nil {
			if err := w.rate.WaitN(w.ctx, n); err != nil {
				return written, err
			}
		}
		if err := http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(mirrorStall)); err != nil {
			return written, err
		}
		n, err := w.ResponseWriter.Write(p[:n])
		written += n
		if err != nil {
			return written, err
		}
		p = p[n:]
	}
	return written, nil
}
