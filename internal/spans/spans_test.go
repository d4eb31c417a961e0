package spans

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// TestSteps: a step is a child of the call's span, also in a context that outlives the call, and has the step's error.
func TestSteps(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
	ctx, call := provider.Tracer("test").Start(t.Context(), "call")
	failure := errors.New("failed")
	err := Run(ctx, "outer", func(ctx context.Context) error {
		return Run(Follow(context.Background(), ctx), "inner", func(context.Context) error { return failure }, Pod("p"))
	})
	if !errors.Is(err, failure) {
		t.Errorf("Run() = %v, want the step's error", err)
	}
	call.End()
	ended := recorder.Ended()
	if len(ended) != 3 {
		t.Fatalf("%d spans have ended, want 3", len(ended))
	}
	inner, outer, root := ended[0], ended[1], ended[2]
	if inner.Name() != "inner" || inner.Parent().SpanID() != outer.SpanContext().SpanID() ||
		outer.Parent().SpanID() != root.SpanContext().SpanID() {
		t.Errorf("the spans %s, %s and %s are not children of each other", inner.Name(), outer.Name(), root.Name())
	}
	if inner.Status().Code != codes.Error || inner.Status().Description != "failed" || len(inner.Attributes()) != 1 ||
		inner.Attributes()[0] != Pod("p") {
		t.Errorf("the span has status %v and attributes %v, want the error and the pod", inner.Status(), inner.Attributes())
	}
}

// TestNoSpan: without a sampled span in the context, a step makes none.
func TestNoSpan(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder), sdktrace.WithSampler(sdktrace.NeverSample()))
	unsampled, call := provider.Tracer("test").Start(t.Context(), "call")
	defer call.End()
	for _, ctx := range []context.Context{t.Context(), unsampled} {
		got, end := Start(ctx, "step")
		end(errors.New("failed"))
		if got != ctx {
			t.Error("a step without a span has a context of its own")
		}
	}
	if n := len(recorder.Started()); n != 0 {
		t.Errorf("%d spans were made, want none", n)
	}
}

var (
	begun      = regexp.MustCompile(`(?:spans\.(?:Start|Run)|\.step)\(ctx, "([a-z.-]+)"`)
	documented = regexp.MustCompile("`([a-z]+\\.[a-z-]+)`")
)

// TestStepsAreDocumented: docs/kubernetes.md lists the steps that the code begins.
func TestStepsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| span | is the time of |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	listed, found := map[string]bool{}, map[string]bool{}
	for row := range strings.Lines(table) {
		for _, m := range documented.FindAllStringSubmatch(strings.Split(row, "|")[1], -1) {
			listed[m[1]] = true
		}
	}
	err = filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		code, err := os.ReadFile(path)
		for _, m := range begun.FindAllStringSubmatch(string(code), -1) {
			found[m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := slices.Sorted(maps.Keys(listed)), slices.Sorted(maps.Keys(found)); len(want) < 10 || !slices.Equal(got, want) {
		t.Errorf("docs/kubernetes.md lists %q, and the code begins %q", got, want)
	}
}
