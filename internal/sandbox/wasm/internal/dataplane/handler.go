package dataplane

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/tripod-run/tripod/internal/guard"
)

// Options are what handlers of both kinds take.
type Options struct {
	// Limiter bounds the requests under way; nil is no bound. Health and reflection are not bounded.
	Limiter *Limiter
	// MaxTimeout bounds how long a request may take, whatever the client allows it; 0 is no bound.
	MaxTimeout time.Duration
	// Metrics counts; nil is no counting. Health and reflection are not counted.
	Metrics *Metrics
	// Tracer makes a span per request, a child of the request's traceparent; nil is no spans.
	Tracer trace.TracerProvider
	// Logger takes the causes that clients are not told; slog.Default() by default.
	Logger *slog.Logger
}

// GRPCOptions are the options of NewGRPC.
type GRPCOptions struct {
	Options
	Methods []*Method
	Invoker Invoker
	// MaxMessageBytes bounds each message of a client, uncompressed; 4 MiB by default. What a component sends is bounded by
	// the Invoker.
	MaxMessageBytes int
	// ReceiveTimeout bounds how long the one message of a request that does not stream may take to arrive: a client that
	// holds it back holds a place of the Limiter. 30 seconds by default.
	ReceiveTimeout time.Duration
	// Health answers grpc.health.v1.Health; by default every service of Methods is SERVING.
	Health *Health
	// Files are the descriptors that server reflection (v1 and v1alpha) tells, and in which JSON finds the types of
	// google.protobuf.Any; nil: no reflection.
	Files *protoregistry.Files
}

// grpcHandler answers the requests of a gRPC component: gRPC itself, the rest through connect-go.
type grpcHandler struct {
	GRPCOptions
	endpoints  map[string]*endpoint
	tracer     tracer
	reflection func() http.Handler // made at its first use
}

// endpoint is one method and who answers it.
type endpoint struct {
	*Method
	invoker Invoker
	limiter *Limiter
	timeout time.Duration // the longest that a request may take; 0 is no bound
	stats   *methodMetrics
	connect func() http.Handler // made at its first use
}

// NewGRPC makes the handler of a gRPC component. errdefs.ErrInvalidArgument when two methods have one procedure, or
// there is no Invoker.
func NewGRPC(o GRPCOptions) (http.Handler, error) {
	if o.Invoker == nil {
		return nil, fmt.Errorf("a gRPC handler needs an Invoker: %w", errdefs.ErrInvalidArgument)
	}
	if o.MaxMessageBytes == 0 {
		o.MaxMessageBytes = 4 << 20
	}
	if o.ReceiveTimeout == 0 {
		o.ReceiveTimeout = 30 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Health == nil {
		o.Health = NewHealth(serviceNames(o.Methods)...)
	}
	h := &grpcHandler{GRPCOptions: o, endpoints: map[string]*endpoint{}, tracer: newTracer(o.Tracer)}
	h.reflection = sync.OnceValue(h.newReflection)
	for _, m := range o.Methods {
		if h.endpoints[m.Procedure] != nil {
			return nil, fmt.Errorf("two methods are called %s: %w", m.Procedure, errdefs.ErrInvalidArgument)
		}
		h.add(&endpoint{
			Method: m, invoker: o.Invoker, limiter: o.Limiter, timeout: o.MaxTimeout, stats: o.Metrics.method(m.Procedure),
		})
	}
	for _, m := range healthMethods() {
		if h.endpoints[m.Procedure] == nil { // a component may answer for itself
			h.add(&endpoint{Method: m, invoker: o.Health})
		}
	}
	return h, nil
}

func (h *grpcHandler) add(e *endpoint) {
	e.connect = sync.OnceValue(func() http.Handler { return h.newConnect(e) })
	h.endpoints[e.Procedure] = e
}

func (h *grpcHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	contentType := firstValue(r.Header, "Content-Type")
	grpc := isGRPC(contentType)
	if grpc && r.ProtoMajor < 2 {
		http.Error(w, "gRPC needs HTTP/2 or HTTP/3; gRPC-Web and Connect are served over HTTP/1.1", http.StatusHTTPVersionNotSupported)
		return
	}
	e := h.endpoints[r.URL.Path]
	switch {
	case e == nil && h.Files != nil && strings.HasPrefix(r.URL.Path, reflectionPrefix):
		h.reflection().ServeHTTP(w, r)
	case e == nil:
		h.unknownMethod(w, r, contentType)
	case grpc && !isJSON(contentType):
		h.serveGRPC(w, r, e, contentType)
	default:
		if e.timeout > 0 {
			ctx, cancel := context.WithTimeout(r.Context(), e.timeout)
			defer cancel()
			r = r.WithContext(ctx)
		}
		e.connect().ServeHTTP(w, r)
	}
}

// unknownMethod answers requests for what the component does not serve.
func (h *grpcHandler) unknownMethod(w http.ResponseWriter, r *http.Request, contentType string) {
	status := Errorf(codes.Unimplemented, "no method %s here", r.URL.Path)
	if strings.HasPrefix(contentType, grpcContentType) { // gRPC-Web takes the status from the header too
		header := w.Header()
		header["Content-Type"] = []string{contentType}
		status.addTo(header, "")
		w.WriteHeader(http.StatusOK)
		return
	}
	http.Error(w, status.Message, http.StatusNotFound)
}

// run has a call answered: bounds, span, counters. nil is success.
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

// invoke calls the Invoker. A panic of it, or of what it calls, is one request's end and no more.
func (h *grpcHandler) invoke(ctx context.Context, e *endpoint, c Call) (status *Status) {
	defer func() {
		if p := recover(); p != nil {
			_ = guard.Report(h.Logger.With("procedure", e.Procedure), "gRPC request", p)
			status = Errorf(codes.Internal, "internal error, see the log of the node")
		}
	}()
	return statusOf(ctx, e.invoker.Invoke(ctx, e.Method, c), h.Logger, e.Method)
}

// serviceNames are the services that methods belong to, in order and once each.
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

// firstValue is Header.Get for a canonical key, without its cost.
func firstValue(h http.Header, key string) string {
	if v := h[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}
