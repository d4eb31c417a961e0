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

// spans gathers the spans of all pods and hands them to the daemon, in OTLP: the worker has no network of its own.
type spans struct{ processor sdktrace.SpanProcessor }

// spanInterval is how long spans wait for company.
const spanInterval = time.Second

func newSpans(publish func(workerapi.Event)) *spans {
	exporter := otlptrace.NewUnstarted(forwarder(publish))
	return &spans{sdktrace.NewBatchSpanProcessor(exporter, sdktrace.WithBatchTimeout(spanInterval))}
}

// provider makes the spans of one pod, whose resource names the component. nil when there are to be none.
func (s *spans) provider(spec workerapi.PodSpec) trace.TracerProvider {
	if s == nil {
		return nil
	}
	// The names are those of OpenTelemetry's semantic conventions for resources.
	about := resource.NewSchemaless(attribute.String("service.name", spec.Component), attribute.String("service.instance.id", spec.ID))
	// The provider is never shut down, which would end the processor that all pods share.
	return sdktrace.NewTracerProvider(sdktrace.WithResource(about), sdktrace.WithSpanProcessor(s.processor),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.AlwaysSample())))
}

// close sends what there is.
func (s *spans) close() {
	if s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), spanInterval)
	defer cancel()
	_ = s.processor.Shutdown(ctx) // nobody is left to tell
}

// forwarder is an otlptrace.Client whose connection is the control protocol.
type forwarder func(workerapi.Event)

func (f forwarder) Start(context.Context) error { return nil }
func (f forwarder) Stop(context.Context) error  { return nil }

// maxSpansEvent keeps an event within what connections queue.
const maxSpansEvent = 512 << 10

// UploadTraces sends each resource by itself when all together are too large.
func (f forwarder) UploadTraces(ctx context.Context, list []*tracepb.ResourceSpans) error {
	// TracesData is ExportTraceServiceRequest on the wire, in a package without a gateway.
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
