package metrics

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/guard"
)

const (
	// maxBatches is the capacity of the queue of span batches.
	maxBatches = 256
	// uploadTimeout limits one upload with its retries; closePatience limits the uploads at the end.
	uploadTimeout = 10 * time.Second
	closePatience = 2 * time.Second
)

// Tracing exports spans to an OpenTelemetry collector. It honours the client's own environment variables
// (OTEL_EXPORTER_OTLP_HEADERS …).
type Tracing struct {
	client  otlptrace.Client
	log     *slog.Logger
	queue   chan []byte
	dropped prometheus.Counter
	stop    chan struct{}      // closed when no more batches follow
	end     context.CancelFunc // cancels uploads under way
	done    sync.WaitGroup
	once    sync.Once
}

// NewTracing connects to a collector once there is something to send. endpoint is http://HOST:PORT, or https://HOST:PORT for
// TLS; any other is errdefs.ErrInvalidArgument.
func NewTracing(ctx context.Context, endpoint string, log *slog.Logger) (*Tracing, error) {
	u, err := url.Parse(endpoint)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Port() == "" {
		return nil, fmt.Errorf("tracing endpoint %q is not http://HOST:PORT or https://HOST:PORT of an OTLP collector (gRPC): %w", endpoint, errdefs.ErrInvalidArgument)
	}
	t := &Tracing{
		client: otlptracegrpc.NewClient(otlptracegrpc.WithEndpointURL(endpoint), otlptracegrpc.WithTimeout(uploadTimeout)),
		log:    log, queue: make(chan []byte, maxBatches), stop: make(chan struct{}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tripod_span_batches_dropped_total", Help: "Batches of spans that were not handed to the collector.",
		}),
	}
	if err := t.client.Start(ctx); err != nil {
		return nil, fmt.Errorf("tracing endpoint %s: %w", endpoint, err)
	}
	uploads, end := context.WithCancel(context.WithoutCancel(ctx))
	t.end = end
	t.done.Go(guard.Loop(log, "spans", func() { t.upload(uploads) }))
	return t, nil
}

// Dropped counts the batches that were not exported, for Metrics.Register.
func (t *Tracing) Dropped() prometheus.Collector { return t.dropped }

// Forward queues a batch, a serialized ExportTraceServiceRequest. It never blocks: without room, the batch is dropped.
func (t *Tracing) Forward(batch []byte) {
	select {
	case t.queue <- batch:
	default:
		t.dropped.Inc()
	}
}

// upload exports queued batches until stop, and then the rest.
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
		ctx, cancel := context.WithTimeout(ctx, uploadTimeout)
		defer cancel()
		err = t.client.UploadTraces(ctx, request.ResourceSpans)
	}
	if err == nil {
		return
	}
	t.dropped.Inc()
	t.once.Do(func() {
		t.log.Warn("cannot export spans; further failures are only counted", "err", err)
	})
}

// Close gives queued batches a moment and then ends the export.
func (t *Tracing) Close() error {
	close(t.stop)
	timer := time.AfterFunc(closePatience, t.end)
	defer timer.Stop()
	t.done.Wait()
	t.end()
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	return t.client.Stop(ctx)
}
