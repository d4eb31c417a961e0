package dataplane

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/tripod-run/tripod/internal/guard"
)

// Options are the options common to NewGRPC and NewHTTP.
type Options struct {
	// Limiter bounds the number of concurrent requests; nil means no limit. Health and reflection are not limited.
	Limiter *Limiter
	// MaxTimeout bounds the duration of a request, even if the client allows more; 0 means no limit.
	MaxTimeout time.Duration
	// Metrics counts requests, except those to health and reflection; nil counts nothing.
	Metrics *Metrics
	// Tracer makes a span per request, as a child of the request's traceparent; nil makes no spans.
	Tracer trace.TracerProvider
	// Logger gets the causes of internal errors, which clients do not see; slog.Default() by default.
	Logger *slog.Logger
}

// GRPCOptions are the options of NewGRPC.
type GRPCOptions struct {
	Options
	Methods []*Method
	Invoker Invoker
	// MaxMessageBytes bounds the uncompressed size of each client message; 4 MiB by default. The Invoker bounds
	// responses.
	MaxMessageBytes int
	// ReceiveTimeout bounds the wait for the message of a request that is not client-streaming, because a waiting
	// request occupies a slot of the Limiter. 30 seconds by default.
	ReceiveTimeout time.Duration
	// Ahead is the memory for the rests of half-duplex streams; AheadMemory bytes by default.
	Ahead Memory
	// Health serves grpc.health.v1.Health; by default every service of Methods is SERVING.
	Health *Health
	// Files are the descriptors for server reflection (v1 and v1alpha) and for google.protobuf.Any in JSON; nil
	// disables reflection.
	Files *protoregistry.Files
}

// grpcHandler serves the requests to a gRPC component: gRPC itself, and other protocols through connect-go.
type grpcHandler struct {
	GRPCOptions
	endpoints  map[string]*endpoint
	tracer     tracer
	reflection func() http.Handler // created on first use
}

// endpoint is a method with its Invoker and limits.
type endpoint struct {
	*Method
	invoker Invoker
	limiter *Limiter
	timeout time.Duration // maximum duration of a request; 0 means no limit
	stats   *methodMetrics
	connect func() http.Handler // of Connect; created on first use, as the next one
	grpc    func() http.Handler // of gRPC-Web and gRPC with JSON
}

// NewGRPC returns the handler for a gRPC component. It returns errdefs.ErrInvalidArgument if two methods have the same
// procedure or there is no Invoker.
func NewGRPC(o GRPCOptions) (http.Handler, error) {
	if o.Invoker == nil {
		return nil, fmt.Errorf("a gRPC handler needs an Invoker: %w", errdefs.ErrInvalidArgument)
	}
	o.MaxMessageBytes = cmp.Or(o.MaxMessageBytes, 4<<20)
	o.ReceiveTimeout = cmp.Or(o.ReceiveTimeout, 30*time.Second)
	o.Logger = cmp.Or(o.Logger, slog.Default())
	if o.Ahead == nil {
		o.Ahead = semaphore.NewWeighted(AheadMemory)
	}
	if o.Health == nil {
		o.Health = NewHealth(serviceNames(o.Methods)...)
	}
	h := &grpcHandler{GRPCOptions: o, endpoints: map[string]*endpoint{}, tracer: newTracer(o.Tracer)}
	h.reflection = sync.OnceValue(h.newReflection)
	for _, m := range o.Methods {
		if h.endpoints[m.Procedure] != nil {
			return nil, fmt.Errorf("duplicate method %s: %w", m.Procedure, errdefs.ErrInvalidArgument)
		}
		h.add(&endpoint{
			Method: m, invoker: o.Invoker, limiter: o.Limiter, timeout: o.MaxTimeout, stats: o.Metrics.method(m.Procedure),
		})
	}
	for _, m := range healthMethods() {
		if h.endpoints[m.Procedure] == nil { // unless the component serves the method itself
			h.add(&endpoint{Method: m, invoker: o.Health})
		}
	}
	return h, nil
}

func (h *grpcHandler) add(e *endpoint) {
	e.connect = sync.OnceValue(func() http.Handler { return h.newConnect(e) })
	e.grpc = sync.OnceValue(func() http.Handler { return h.newGRPCOverConnect(e) })
	h.endpoints[e.Procedure] = e
}

func (h *grpcHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	media := MediaType(r.Header)
	grpc := isGRPC(media)
	if grpc && r.ProtoMajor < 2 {
		http.Error(w, "gRPC needs HTTP/2 or HTTP/3; gRPC-Web and Connect are served over HTTP/1.1", http.StatusHTTPVersionNotSupported)
		return
	}
	if isOf(media, webTextContentType) {
		text, decoded := webText(w, r, media)
		defer text.finish()
		w, r, media = text, decoded, MediaType(decoded.Header)
	}
	e := h.endpoints[r.URL.Path]
	switch {
	case e == nil && h.Files != nil && strings.HasPrefix(r.URL.Path, reflectionPrefix):
		h.serveConnect(w, r, media, h.reflection())
	case e == nil:
		h.unknownMethod(w, r, media)
	case isProto(media):
		h.serveGRPC(w, r, e, media)
	case !slices.Contains(e.allowed(), r.Method):
		w.Header().Set("Allow", strings.Join(e.allowed(), ", "))
		w.WriteHeader(http.StatusMethodNotAllowed)
	default:
		if e.timeout > 0 {
			ctx, cancel := context.WithTimeout(r.Context(), e.timeout)
			defer cancel()
			r = r.WithContext(ctx)
		}
		next := e.connect
		if IsGRPCFamily(media) {
			next = e.grpc
		}
		h.serveConnect(w, r, media, next())
	}
}

// allowed returns the HTTP methods of requests that are not native gRPC.
func (e *endpoint) allowed() []string {
	if idempotency(e.Desc) != connect.IdempotencyNoSideEffects || e.Desc.IsStreamingClient() || e.Desc.IsStreamingServer() {
		return []string{http.MethodPost}
	}
	return []string{http.MethodGet, http.MethodHead, http.MethodPost}
}

// unknownMethod answers a request to a method that the component does not serve.
func (h *grpcHandler) unknownMethod(w http.ResponseWriter, r *http.Request, media string) {
	status := Errorf(codes.Unimplemented, "unknown method %s", r.URL.Path)
	if IsGRPCFamily(media) { // gRPC-Web clients also read the status from the header
		header := w.Header()
		header["Content-Type"] = []string{media}
		status.addTo(header, "")
		w.WriteHeader(http.StatusOK)
		return
	}
	http.Error(w, status.Message, http.StatusNotFound)
}

// run runs a call within its limits, and records its span and counters. It returns nil on success.
func (h *grpcHandler) run(ctx context.Context, e *endpoint, c Call, protocol string) *Status {
	started := time.Now()
	e.stats.begin()
	ctx, span := h.tracer.start(ctx, e.Method, c, protocol)
	status := e.limiter.acquire(ctx)
	if status == nil {
		status = h.invoke(ctx, e, c)
		e.limiter.release()
	}
	code := codes.OK
	if status != nil {
		code = status.Code
	}
	span.end(code, status)
	e.stats.end(int(code), time.Since(started))
	return status
}

// invoke calls the Invoker. It recovers from a panic, so that only this request fails.
func (h *grpcHandler) invoke(ctx context.Context, e *endpoint, c Call) (status *Status) {
	defer func() {
		if p := recover(); p != nil {
			_ = guard.Report(h.Logger.With("procedure", e.Procedure), "gRPC request", p)
			status = errInternal()
		}
	}()
	return statusOf(ctx, e.invoker.Invoke(ctx, e.Method, c), h.Logger, e.Method)
}

// serviceNames returns the services of the methods, in order and without duplicates.
func serviceNames(methods []*Method) []string {
	var names []string
	seen := map[string]bool{}
	for _, m := range methods {
		service, _, _ := strings.Cut(strings.TrimPrefix(m.Procedure, "/"), "/")
		if !seen[service] {
			seen[service] = true
			names = append(names, service)
		}
	}
	return names
}

// firstValue is a faster Header.Get for a canonical key.
func firstValue(h http.Header, key string) string {
	if v := h[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}
