package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tripod-run/tripod/test/harness"
)

// pushWasm runs `tripod push` with an example and returns the name of the image.
func pushWasm(t *testing.T, example, name string, more ...string) string {
	t.Helper()
	tripod, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), tripod,
		append([]string{"push", "--plain-http", example, harness.Registry(t).Addr + "/" + name}, more...)...)
	c.Dir = filepath.Join(harness.Root(), "examples", "wasm")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%q: %v\n%s", c.Args, err, out)
	}
	return harness.ImagePrefix + name
}

// TestWasmGoServer: `tripod push` builds an ordinary gRPC server in Go, and the pod serves it like any component.
func TestWasmGoServer(t *testing.T) {
	image := pushWasm(t, "greeter-go", "pushed/greeter-go:1")
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, image, greeter, env("POD_NAME", "pod-1"))
	harness.Eventually(t, waitLimit, func() error { // the figures are shared for a moment
		info, err := d.Runtime().ContainerStatus(s.context(), c.ID, true)
		if text := info.GetInfo()["info"]; err != nil || !strings.Contains(text, `"snapshot":{"bytes":`) {
			return fmt.Errorf("inspect: got %s, %v; want a snapshot for the first request", text, err)
		}
		return nil
	})
	s.everyProtocol(`{"message":"Hello, Ada!","servedBy":"pod-1"}`)
	_, other := startComponent(t, d, image, greeter, env("POD_NAME", "pod-2"))
	other.everyProtocol(`{"message":"Hello, Ada!","servedBy":"pod-2"}`) // each pod has its own environment

	s.metadataAndStatus("1", "2")

	// The context of the handler ends at the deadline of its client. The client also cancels then, and may be first.
	ctx, cancel := context.WithTimeout(s.context(), 300*time.Millisecond)
	defer cancel()
	stream, method := s.stream(ctx, greeter+"/Countdown")
	err := stream.SendMsg(s.message(method.Input(), `{"from":1000,"intervalMs":20}`))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for err = nil; err == nil; n++ {
		err = stream.RecvMsg(dynamicpb.NewMessage(method.Output()))
	}
	if status.Code(err) != codes.DeadlineExceeded || n < 2 {
		t.Errorf("stream with a deadline: got %d messages and %v, want a few and DeadlineExceeded", n-1, err)
	}
	harness.Eventually(t, waitLimit, func() error {
		if log := harness.Text(c.Logs(), "stderr"); !strings.Contains(log, "Countdown: context ") {
			return fmt.Errorf("log: got %q, want the handler's own notice of the deadline", log)
		}
		return nil
	})
}

// metadataAndStatus wants that a Greeter answers with the request's metadata, and details of an error.
func (s *served) metadataAndStatus(ids ...string) {
	s.Helper()
	var header, trailer metadata.MD
	ctx := metadata.AppendToOutgoingContext(s.context(), "x-trace-bin", "\x00\xff")
	for _, id := range ids {
		ctx = metadata.AppendToOutgoingContext(ctx, "x-request-id", id)
	}
	_, err := s.try(ctx, greeter+"/SayHello", `{"name":"Ada"}`, grpc.Header(&header), grpc.Trailer(&trailer))
	if err != nil || !slices.Equal(header.Get("x-request-id"), ids) || !slices.Equal(trailer.Get("x-trace-bin"), []string{"\x00\xff"}) {
		s.Errorf("metadata: got header %v, trailer %v, error %v", header, trailer, err)
	}
	_, err = s.try(s.context(), greeter+"/SayHello", `{}`)
	details := status.Convert(err).Details()
	if status.Code(err) != codes.InvalidArgument || len(details) != 1 || details[0].(*wrapperspb.StringValue).Value != "name" {
		s.Errorf("status: got %v with details %v, want InvalidArgument and the field", err, details)
	}
}

// TestWasmFallback: a component whose instances cannot begin from a snapshot says why, once, in the events and in the log.
func TestWasmFallback(t *testing.T) {
	guest := filepath.Join(harness.Root(), "internal/sandbox/wasm/internal/worker/testdata/snapshot.wasm")
	image := pushWasm(t, guest, "pushed/random:1", "--proto", "raw-c/sum.proto")
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, image, "sum.v1.Sums", env("DO", "random"))
	for range 3 {
		_, _ = s.try(s.context(), "sum.v1.Sums/Add", `{"numbers":["1"]}`) // the answer is not protobuf
	}
	const why = "each request initializes the component again, because there is no snapshot: it asks for random values"
	c.WaitLog("tripod: " + why)
	harness.Eventually(t, waitLimit, func() error {
		out, err := tripod(t, d, "events").CombinedOutput()
		if n := strings.Count(string(out), ": "+why); err != nil || n != 1 || !strings.Contains(string(out), "  fallback   ") {
			return fmt.Errorf("tripod events: got error %v and\n%s\nwant one fallback", err, out)
		}
		return nil
	})
}

// TestWasmRawC: a core module in C on tripod:grpc/raw serves with the descriptors of a .proto, also for clients that
// send JSON.
func TestWasmRawC(t *testing.T) {
	image := pushWasm(t, "raw-c/raw-c.wasm", "pushed/raw-c:1", "--proto", "raw-c/sum.proto")
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, image, "sum.v1.Sums")
	if got := s.call("sum.v1.Sums/Add", `{"numbers":["1","2","300"]}`); got != `{"total":"303"}` {
		t.Errorf("Add: got %s, want 303", got)
	}
	if got := s.callQUIC("sum.v1.Sums/Add", `{"numbers":["1","2","300"]}`); got != `{"total":"303"}` {
		t.Errorf("Add over HTTP/3: got %s, want 303", got)
	}
	_, err := s.try(s.context(), "sum.v1.Sums/Add", `{}`)
	wantCode(t, err, codes.InvalidArgument)
	c.WaitLog(`level=WARN msg="numbers: must not be empty" context=sum.v1.Sums`)
	if got, err := s.exchange("sum.v1.Sums/Running", `{"numbers":["1"]}`, `{"numbers":["5","6"]}`); err != nil ||
		!slices.Equal(got, []string{`{"total":"1"}`, `{"total":"12"}`}) {
		t.Errorf("Running: got %v, error %v; want 1 and 12", got, err)
	}
}
