package dataplane

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"net/http"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/guard"
)

// NewHTTP returns a handler that serves a wasi:http component through next. It answers 503 to requests over the limit,
// and cancels the context of a request after MaxTimeout.
func NewHTTP(o Options, next http.Handler) http.Handler {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	return &httpHandler{Options: o, next: next, stats: o.Metrics.method(httpProcedure), tracer: newTracer(o.Tracer)}
}

type httpHandler struct {
	Options
	next   http.Handler
	stats  *methodMetrics
	tracer tracer
}

func (h *httpHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	started := time.Now()
	h.stats.begin()
	ctx, span := h.tracer.startHTTP(r)
	cancel := context.CancelFunc(func() {})
	if h.MaxTimeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, h.MaxTimeout)
	}
	defer cancel()
	counted := &countingWriter{ResponseWriter: w, stats: h.stats}
	defer func() {
		p := recover()
		if p != nil && p != http.ErrAbortHandler {
			_ = guard.Report(h.Logger.With("path", r.URL.Path), "HTTP request", p)
		}
		if p != nil && counted.status == 0 {
			counted.status = http.StatusInternalServerError
		}
		status := max(counted.status, http.StatusOK)
		span.endHTTP(status)
		h.stats.end(status, time.Since(started))
		if p != nil {
			panic(http.ErrAbortHandler) // aborts the response
		}
	}()
	if refused := h.Limiter.acquire(ctx); refused != nil {
		refuse(counted, refused)
		return
	}
	defer h.Limiter.release()
	r = r.WithContext(ctx)
	if r.Body != nil {
		r.Body = &countingBody{ReadCloser: r.Body, stats: h.stats}
	}
	h.next.ServeHTTP(counted, r)
}

// refuse answers a request that the Limiter refused.
func refuse(w http.ResponseWriter, s *Status) {
	status := http.StatusServiceUnavailable
	if s.Code == codes.DeadlineExceeded {
		status = http.StatusGatewayTimeout
	}
	w.Header().Set("Retry-After", "1")
	http.Error(w, s.Message, status)
}

// countingWriter counts the bytes written and records the status.
type countingWriter struct {
	http.ResponseWriter
	stats  *methodMetrics
	status int
}

// Unwrap lets http.ResponseController use the wrapped writer.
func (w *countingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *countingWriter) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK { // not informational
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *countingWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(b)
	w.stats.addSent(n)
	return n, err
}

// Flush implements http.Flusher.
func (w *countingWriter) Flush() { _ = http.NewResponseController(w.ResponseWriter).Flush() }

// countingBody counts the bytes read.
type countingBody struct {
	io.ReadCloser
	stats *methodMetrics
}

func (b *countingBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.stats.addReceived(n)
	return n, err
}
