package metrics

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/lazyregexp"
)

const (
	// maxBatches is the capacity of the queue of span batches.
	maxBatches = 256
	// uploadTimeout limits each upload, including its retries. closePatience limits the uploads during Close.
	uploadTimeout = 10 * time.Second
	closePatience = 2 * time.Second
	// spanInterval is the longest time that a span of the daemon waits for its batch to be sent.
	spanInterval = time.Second
)

// Tracing exports spans to an OpenTelemetry collector: those of the daemon's own calls, and those that workers have made. It
// honours the environment variables of OpenTelemetry's client, such as OTEL_EXPORTER_OTLP_HEADERS.
type Tracing struct {
	client  otlptrace.Client
	spans   *sdktrace.TracerProvider // of the daemon's own
	log     *slog.Logger
	queue   chan []byte
	dropped prometheus.Counter
	stop    chan struct{}      // closed by Close
	end     context.CancelFunc // cancels running uploads
	done    sync.WaitGroup
	once    sync.Once
}

// NewTracing makes a Tracing, which connects to the collector when there is something to send. The endpoint is
// http://HOST:PORT, or https://HOST:PORT for TLS. Any other endpoint is an errdefs.ErrInvalidArgument. version is that of the
// program.
func NewTracing(ctx context.Context, endpoint, version string, log *slog.Logger) (*Tracing, error) {
	u, err := url.Parse(endpoint)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Port() == "" {
		return nil, fmt.Errorf("tracing endpoint %q is not http://HOST:PORT or https://HOST:PORT of an OTLP collector (gRPC): %w", endpoint,
			errdefs.ErrInvalidArgument)
	}
	t := &Tracing{
		client: otlptracegrpc.NewClient(otlptracegrpc.WithEndpointURL(endpoint), otlptracegrpc.WithTimeout(uploadTimeout)),
		log:    log, queue: make(chan []byte, maxBatches), stop: make(chan struct{}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tripod_span_batches_dropped_total", Help: "Batches of spans that did not reach the collector.",
		}),
	}
	if err := t.client.Start(ctx); err != nil {
		return nil, fmt.Errorf("tracing endpoint %s: %w", endpoint, err)
	}
	about := resource.NewSchemaless(attribute.String("service.name", "tripod"), attribute.String("service.version", version))
	t.spans = sdktrace.NewTracerProvider(sdktrace.WithResource(about), sdktrace.WithSampler(sdktrace.ParentBased(asked{})),
		sdktrace.WithBatcher(otlptrace.NewUnstarted(uploader{t}), sdktrace.WithBatchTimeout(spanInterval)))
	uploads, end := context.WithCancel(context.WithoutCancel(ctx))
	t.end = end
	t.done.Go(guard.Loop(log, "spans", func() { t.upload(uploads) }))
	return t, nil
}

// Dropped returns the counter of batches that were not exported, for Metrics.Register.
func (t *Tracing) Dropped() prometheus.Collector { return t.dropped }

// Forward queues a batch of spans, in the form of an encoded ExportTraceServiceRequest. It never blocks: if the queue
// is full, it drops the batch.
func (t *Tracing) Forward(batch []byte) {
	select {
	case t.queue <- batch:
	default:
		t.dropped.Inc()
	}
}

// upload exports queued batches until the queue is empty and stop is closed.
func (t *Tracing) upload(ctx context.Context) {
	for {
		select {
		case batch := <-t.queue:
			t.send(ctx, batch)
			continue
		default:
		}
		select {
		case batch := <-t.queue:
			t.send(ctx, batch)
		case <-t.stop:
			return
		}
	}
}

func (t *Tracing) send(ctx context.Context, batch []byte) {
	if ctx.Err() != nil {
		t.dropped.Inc()
		return
	}
	var request collector.ExportTraceServiceRequest
	err := proto.Unmarshal(batch, &request)
	if err == nil {
		_ = uploader{t}.UploadTraces(ctx, request.ResourceSpans) // counts what fails
		return
	}
	t.lost(err)
}

// lost counts a batch that did not reach the collector.
func (t *Tracing) lost(err error) {
	t.dropped.Inc()
	t.once.Do(func() {
		t.log.Warn("cannot export spans; further failures are only counted", "err", err)
	})
}

// uploader is the client of the collector for both sorts of spans. It counts failures instead of returning them.
type uploader struct{ *Tracing }

// Start implements otlptrace.Client; NewTracing has started the client.
func (uploader) Start(context.Context) error { return nil }

// Stop implements otlptrace.Client; Close stops the client.
func (uploader) Stop(context.Context) error { return nil }

// UploadTraces implements otlptrace.Client.
func (u uploader) UploadTraces(ctx context.Context, list []*tracepb.ResourceSpans) error {
	ctx, cancel := context.WithTimeout(ctx, uploadTimeout)
	defer cancel()
	if err := u.client.UploadTraces(ctx, list); err != nil {
		u.lost(err)
	}
	return nil
}

// asked samples the calls that change something. A kubelet lists and looks many times a second; such calls have spans only if
// their caller wants one, by a sampled traceparent.
type asked struct{}

// looks matches the methods of the CRI that change nothing.
var looks = lazyregexp.New(`^(List|Stream|Get).*$|^.*(Status|Stats)$|^(Version|RuntimeConfig|ImageFsInfo)$`)

// ShouldSample implements sdktrace.Sampler for spans without a parent, whose names are gRPC methods.
func (asked) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	_, method, _ := strings.Cut(p.Name, "/")
	if looks().MatchString(method) {
		return sdktrace.NeverSample().ShouldSample(p)
	}
	return sdktrace.AlwaysSample().ShouldSample(p)
}

// Description implements sdktrace.Sampler.
func (asked) Description() string { return "calls that change something" }

// ServerOption makes a gRPC server record a span for each call, as a child of the traceparent in the call's metadata (W3C Trace
// Context). The steps of the call (package spans) become its children.
func (t *Tracing) ServerOption() grpc.ServerOption {
	return grpc.StatsHandler(otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(t.spans),
		otelgrpc.WithPropagators(propagation.TraceContext{}), otelgrpc.WithMeterProvider(noop.NewMeterProvider())))
}

// Close exports the daemon's spans and the queued batches for at most closePatience, and then closes the client.
func (t *Tracing) Close() error {
	patience, enough := context.WithTimeout(context.Background(), closePatience)
	defer enough()
	_ = t.spans.Shutdown(patience) // the uploader counts what fails
	close(t.stop)
	defer context.AfterFunc(patience, t.end)()
	t.done.Wait()
	t.end()
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	return t.client.Stop(ctx)
}
