package dataplane

import (
	"context"
	"net"
	"net/http"
	"strconv"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
)

// tracer makes a server span per request (OpenTelemetry semantic conventions for RPC and HTTP), as a child of the
// request's traceparent. It replaces the traceparent in the request's header with the span's, which the component can
// then propagate.
type tracer struct{ trace.Tracer }

const tracerName = "github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"

func newTracer(p trace.TracerProvider) tracer {
	if p == nil {
		return tracer{}
	}
	return tracer{p.Tracer(tracerName)}
}

// span is the span of one request. The zero span does nothing.
type span struct{ trace.Span }

func (t tracer) startSpan(ctx context.Context, name string, header http.Header, peer string,
	more ...attribute.KeyValue) (context.Context, span) {
	w3c := propagation.TraceContext{}
	ctx = w3c.Extract(ctx, propagation.HeaderCarrier(header))
	if host, port, err := net.SplitHostPort(peer); err == nil {
		n, _ := strconv.Atoi(port) // an invalid port is recorded as 0
		more = append(more, attribute.String("network.peer.address", host), attribute.Int("network.peer.port", n))
	}
	ctx, s := t.Start(ctx, name, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(more...))
	w3c.Inject(ctx, propagation.HeaderCarrier(header))
	return ctx, span{s}
}

// start starts the span of a call.
func (t tracer) start(ctx context.Context, m *Method, c Call, protocol string) (context.Context, span) {
	if t.Tracer == nil {
		return ctx, span{}
	}
	name := strings.TrimPrefix(m.Procedure, "/")
	service, method, _ := strings.Cut(name, "/")
	return t.startSpan(ctx, name, c.RequestHeader(), c.Peer(), attribute.String("rpc.system", protocol),
		attribute.String("rpc.service", service), attribute.String("rpc.method", method))
}

// startHTTP starts the span of a plain HTTP request.
func (t tracer) startHTTP(r *http.Request) (context.Context, span) {
	if t.Tracer == nil {
		return r.Context(), span{}
	}
	return t.startSpan(r.Context(), r.Method, r.Header, r.RemoteAddr, attribute.String("http.request.method", r.Method),
		attribute.String("url.path", r.URL.Path), attribute.String("network.protocol.version", strings.TrimPrefix(r.Proto, "HTTP/")))
}

func (s span) end(code codes.Code, status *Status) {
	if s.Span == nil {
		return
	}
	s.SetAttributes(attribute.Int("rpc.grpc.status_code", int(code)))
	switch code { // server errors according to the conventions for gRPC
	case codes.Unknown, codes.DeadlineExceeded, codes.Unimplemented, codes.Internal, codes.Unavailable, codes.DataLoss:
		s.SetStatus(otelcodes.Error, status.Error())
	}
	s.End()
}

func (s span) endHTTP(status int) {
	if s.Span == nil {
		return
	}
	s.SetAttributes(attribute.Int("http.response.status_code", status))
	if status >= http.StatusInternalServerError {
		s.SetStatus(otelcodes.Error, http.StatusText(status))
	}
	s.End()
}
