package worker

import (
	"context"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// spans batches the spans of all pods and sends them to the daemon as OTLP events, because the worker has no network
// access.
type spans struct{ processor sdktrace.SpanProcessor }

// spanInterval is the maximum time that a span waits for its batch to be sent.
const spanInterval = time.Second

func newSpans(publish func(workerapi.Event)) *spans {
	exporter := otlptrace.NewUnstarted(forwarder(publish))
	return &spans{sdktrace.NewBatchSpanProcessor(exporter, sdktrace.WithBatchTimeout(spanInterval))}
}

// provider returns the tracer provider for a pod, or nil if spans are off. The provider's resource names the component.
func (s *spans) provider(spec workerapi.PodSpec) trace.TracerProvider {
	if s == nil {
		return nil
	}
	// The attribute names are from OpenTelemetry's resource semantic conventions.
	about := resource.NewSchemaless(attribute.String("service.name", spec.Component), attribute.String("service.instance.id", spec.ID))
	// Never shut the provider down: that would end the processor, which all pods share.
	return sdktrace.NewTracerProvider(sdktrace.WithResource(about), sdktrace.WithSpanProcessor(s.processor),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.AlwaysSample())))
}

// close sends the remaining spans.
func (s *spans) close() {
	if s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), spanInterval)
	defer cancel()
	_ = s.processor.Shutdown(ctx)
}

// forwarder is an otlptrace.Client that publishes spans as events.
type forwarder func(workerapi.Event)

func (f forwarder) Start(context.Context) error { return nil }
func (f forwarder) Stop(context.Context) error  { return nil }

// maxSpansEvent bounds the size of an event with spans, in bytes. It is below workerapi's limit on the spans queued for
// a connection.
const maxSpansEvent = 512 << 10

// UploadTraces publishes the spans as one event, or as several if they exceed maxSpansEvent.
func (f forwarder) UploadTraces(ctx context.Context, list []*tracepb.ResourceSpans) error {
	// TracesData has the wire format of ExportTraceServiceRequest, whose package imports grpc-gateway.
	data, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: list})
	if err != nil {
		return fmt.Errorf("spans: %w", err)
	}
	if len(data) > maxSpansEvent && len(list) > 1 {
		half := len(list) / 2
		if err := f.UploadTraces(ctx, list[:half]); err != nil {
			return err
		}
		return f.UploadTraces(ctx, list[half:])
	}
	f(workerapi.Event{Spans: data})
	return nil
}
