package e2e

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// spanSink is an OpenTelemetry collector that stores spans.
type spanSink struct {
	collector.UnimplementedTraceServiceServer
	mu    sync.Mutex
	spans []*trace.Span
}

// startSpanSink starts a collector, and returns what to set as tracing.endpoint.
func startSpanSink(t *testing.T) (s *spanSink, endpoint string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s = &spanSink{}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, s)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return s, "http://" + l.Addr().String()
}

func (s *spanSink) Export(_ context.Context, r *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, rs := range r.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			s.spans = append(s.spans, ss.Spans...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// find returns the span with a name, or nil.
func (s *spanSink) find(name string) *trace.Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, span := range s.spans {
		if span.Name == name {
			return span
		}
	}
	return nil
}

// ways returns the spans of a trace, each with the names of those above it: "call/step/step".
func (s *spanSink) ways(traceID string) map[string]*trace.Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	byID := map[string]*trace.Span{}
	for _, span := range s.spans {
		byID[string(span.SpanId)] = span
	}
	all := map[string]*trace.Span{}
	for _, span := range s.spans {
		if hex.EncodeToString(span.TraceId) != traceID {
			continue
		}
		way := ""
		for at := span; at != nil; at = byID[string(at.ParentSpanId)] {
			name := at.Name[strings.LastIndexByte(at.Name, '/')+1:]
			way = strings.TrimSuffix(name+"/"+way, "/")
		}
		all[way] = span
	}
	return all
}

// TestSpansOfCalls: calls with a traceparent, as a kubelet sends it, have spans with the steps that they wait for, for pods of
// all kinds.
func TestSpansOfCalls(t *testing.T) {
	sink, endpoint := startSpanSink(t)
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.VM(t), harness.Set("tracing.endpoint", endpoint))
	for handler, kind := range map[string]struct {
		image string
		steps []string
	}{
		"linux": {harness.Busybox, []string{
			"PullImage/image.resolve", "RunPodSandbox/network.setup/cni.add", "RunPodSandbox/backend.create-sandbox",
			"CreateContainer/backend.create-container/layer.prepare", "StartContainer/backend.start-container/oci.create",
			"StartContainer/backend.start-container/oci.start", "ExecSync/backend.exec", "StopContainer/backend.stop-container",
			"RemoveContainer/backend.remove-container", "StopPodSandbox/backend.stop-sandbox", "RemovePodSandbox/backend.remove-sandbox",
		}},
		"wasm": {harness.GreeterC, []string{
			"RunPodSandbox/network.setup/cni.add", "CreateContainer/backend.create-container/worker.load",
			"StartContainer/backend.start-container/worker.start", "StopPodSandbox/backend.stop-sandbox",
		}},
		"vm": {harness.TinyGuest, []string{
			"RunPodSandbox/network.setup/cni.add", "CreateContainer/backend.create-container/vm.disks",
			"CreateContainer/backend.create-container/vm.template", "StartContainer/backend.start-container/vm.start",
		}},
	} {
		traceID, parent := strings.Repeat("0", 32-2*len(handler))+hex.EncodeToString([]byte(handler)), "b7ad6b7169203331"
		ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+traceID+"-"+parent+"-01")
		pod := harness.PodConfig(t, "traced-"+handler)
		if err := os.MkdirAll(pod.LogDirectory, 0o755); err != nil {
			t.Fatal(err)
		}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		_, err := d.ImageCRI().PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: kind.image}})
		must(err)
		run, err := d.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: pod, RuntimeHandler: handler})
		must(err)
		container := harness.ContainerConfig("main", kind.image)
		if handler == "linux" {
			container = harness.ContainerConfig("main", kind.image, harness.Sleep())
		}
		created, err := d.CRI().CreateContainer(ctx,
			&runtimeapi.CreateContainerRequest{PodSandboxId: run.PodSandboxId, Config: container, SandboxConfig: pod})
		must(err)
		id := created.ContainerId
		_, err = d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id})
		must(err)
		if handler == "linux" {
			_, err = d.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 30})
			must(err)
		}
		_, err = d.CRI().StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: 10})
		must(err)
		_, err = d.CRI().RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id})
		must(err)
		_, err = d.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: run.PodSandboxId})
		must(err)
		_, err = d.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: run.PodSandboxId})
		must(err)
		harness.Eventually(t, waitLimit, func() error {
			ways := sink.ways(traceID)
			for _, step := range kind.steps {
				if ways[step] == nil {
					return fmt.Errorf("%s: no span %s among %v", handler, step, ways)
				}
			}
			if got := hex.EncodeToString(ways["RunPodSandbox"].ParentSpanId); got != parent {
				return fmt.Errorf("the parent of RunPodSandbox is %s, want that of the caller, %s", got, parent)
			}
			return nil
		})
	}
	// Without a traceparent, calls that change something have spans, and those that only look have none.
	if _, err := d.CRI().ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.CRI().UpdateRuntimeConfig(t.Context(), &runtimeapi.UpdateRuntimeConfigRequest{}); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, waitLimit, func() error {
		if sink.find("runtime.v1.RuntimeService/UpdateRuntimeConfig") == nil {
			return errors.New("found no span of UpdateRuntimeConfig")
		}
		return nil
	})
	if sink.find("runtime.v1.RuntimeService/ListPodSandbox") != nil {
		t.Error("ListPodSandbox has a span that nobody has asked for")
	}
}
