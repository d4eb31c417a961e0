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
	// uploadTimeout limits each upload, including its retries. closePatience limits the uploads during Close.
	uploadTimeout = 10 * time.Second
	closePatience = 2 * time.Second
)

// Tracing exports spans to an OpenTelemetry collector. It honours the environment variables of OpenTelemetry's client,
// such as OTEL_EXPORTER_OTLP_HEADERS.
type Tracing struct {
	client  otlptrace.Client
	log     *slog.Logger
	queue   chan []byte
	dropped prometheus.Counter
	stop    chan struct{}      // closed by Close
	end     context.CancelFunc // cancels running uploads
	done    sync.WaitGroup
	once    sync.Once
}

// NewTracing makes a Tracing, which connects to the collector when there is something to send. The endpoint is
// http://HOST:PORT, or https://HOST:PORT for TLS. Any other endpoint is an errdefs.ErrInvalidArgument.
func NewTracing(ctx context.Context, endpoint string, log *slog.Logger) (*Tracing, error) {
	u, err := url.Parse(endpoint)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Port() == "" {
		return nil, fmt.Errorf("tracing endpoint %q is not http://HOST:PORT or https://HOST:PORT of an OTLP collector (gRPC): %w", endpoint, errdefs.ErrInvalidArgument)
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

// Close exports queued batches for at most closePatience, and then closes the client.
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
