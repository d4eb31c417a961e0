// Package spans records the steps of a CRI call as spans of OpenTelemetry. The call's own span is made by the gRPC server
// (package metrics) and travels in the context; steps become its children. Without a recorded span in the context, a step
// costs next to nothing, so packages begin steps without knowing whether tracing is on.
//
// A step is worth a span if it can be what a call waits for: a plugin, a download, a program that starts. docs/kubernetes.md
// lists all steps.
package spans

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// tracerName is the instrumentation scope of all steps.
const tracerName = "github.com/tripod-run/tripod/internal/spans"

// Start begins a step and returns its context, and the function that ends it with the step's error or nil.
func Start(ctx context.Context, name string, attributes ...attribute.KeyValue) (context.Context, func(error)) {
	parent := trace.SpanFromContext(ctx)
	if !parent.SpanContext().IsSampled() {
		return ctx, func(error) {}
	}
	ctx, span := parent.TracerProvider().Tracer(tracerName).Start(ctx, name, trace.WithAttributes(attributes...))
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// Run is Start for a function.
func Run(ctx context.Context, name string, step func(context.Context) error, attributes ...attribute.KeyValue) error {
	ctx, end := Start(ctx, name, attributes...)
	err := step(ctx)
	end(err)
	return err
}

// Follow returns a context of base whose steps belong to the span in ctx, for work that outlives the call that asked for it.
func Follow(base, ctx context.Context) context.Context {
	return trace.ContextWithSpan(base, trace.SpanFromContext(ctx))
}

// String is an attribute of a step.
func String(key, value string) attribute.KeyValue { return attribute.String(key, value) }

// Pod is the attribute with the ID of the pod that a step works on.
func Pod(id string) attribute.KeyValue { return String("tripod.pod", id) }
