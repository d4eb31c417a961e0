package metrics

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	resource "go.opentelemetry.io/proto/otlp/resource/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/stats"
)

// scrape returns the endpoint's values by series.
func scrape(t *testing.T, m *Metrics) map[string]string {
	t.Helper()
	return scrapePath(t, m, "/metrics")
}

func scrapePath(t *testing.T, m *Metrics, path string) map[string]string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	if w.Code != http.StatusOK {
		t.Fatalf("GET %s: status %d: %s", path, w.Code, w.Body)
	}
	series := map[string]string{}
	for line := range strings.Lines(w.Body.String()) {
		if name, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && !strings.HasPrefix(line, "#") {
			series[name] = v
		}
	}
	return series
}

func wantSeries(t *testing.T, got map[string]string, want map[string]string) {
	t.Helper()
	for name, v := range want {
		if got[name] != v {
			t.Errorf("%s = %q, want %q", name, got[name], v)
		}
	}
}

func TestPodsAndCalls(t *testing.T) {
	pods := []*node.Pod{
		{Handler: "linux", State: node.Initiated,
			Containers: []*node.Container{{State: node.Running}, {State: node.Stopped}, {State: node.Removed}}},
		{Handler: "linux", State: node.Initiated}, {Handler: "linux", State: node.Killed},
	}
	m := New(Config{Version: "1.2.3", Pods: func() []*node.Pod { return pods }})
	count := m.Interceptor()
	for _, err := range []error{nil, nil, status.Error(codes.NotFound, "none")} {
		_, got := count(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/runtime.v1.RuntimeService/PodSandboxStatus"},
			func(context.Context, any) (any, error) { return nil, err })
		if !errors.Is(got, err) {
			t.Errorf("Interceptor returned %v, want the handler's error %v", got, err)
		}
	}
	countStream := m.StreamInterceptor()
	for _, err := range []error{nil, status.Error(codes.Unavailable, "ends")} {
		got := countStream(nil, nil, &grpc.StreamServerInfo{FullMethod: "/runtime.v1.RuntimeService/StreamContainers"},
			func(any, grpc.ServerStream) error { return err })
		if !errors.Is(got, err) {
			t.Errorf("StreamInterceptor returned %v, want the handler's error %v", got, err)
		}
	}
	wantSeries(t, scrape(t, m), map[string]string{
		`tripod_pods{handler="linux",state="Initiated"}`:                       "2",
		`tripod_pods{handler="linux",state="Killed"}`:                          "1",
		`tripod_containers{handler="linux",state="Running"}`:                   "1",
		`tripod_containers{handler="linux",state="Stopped"}`:                   "1",
		`tripod_containers{handler="linux",state="Removed"}`:                   "",
		`tripod_cri_calls_total{code="OK",method="PodSandboxStatus"}`:          "2",
		`tripod_cri_calls_total{code="NotFound",method="PodSandboxStatus"}`:    "1",
		`tripod_cri_call_duration_seconds_count{method="PodSandboxStatus"}`:    "3",
		`tripod_cri_calls_total{code="OK",method="StreamContainers"}`:          "1",
		`tripod_cri_calls_total{code="Unavailable",method="StreamContainers"}`: "1",
		`tripod_cri_call_duration_seconds_count{method="StreamContainers"}`:    "2",
		`tripod_build_info{version="1.2.3"}`:                                   "1",
	})
}

func TestSamples(t *testing.T) {
	at := time.UnixMilli(1_700_000_000_123)
	m := New(Config{Samples: func(context.Context) []node.PodSamples {
		return []node.PodSamples{{
			ObjectSamples: node.ObjectSamples{
				Owner: stats.Owner{Pod: "p", Namespace: "n", ID: "1"}, Time: at,
				Samples: stats.Samples{{Family: stats.NetworkRxBytes, Value: 5, Labels: []string{"eth0"}}},
			},
			Containers: []node.ObjectSamples{{
				Owner: stats.Owner{Pod: "p", Namespace: "n", Container: "c", ID: "2", Image: "i"}, Time: at,
				Samples: stats.Samples{{Family: stats.CPUUsage, Value: 1.5, Labels: []string{"total"}}, {Family: stats.MemoryRSS, Value: 4096}},
			}},
		}}
	}})
	wantSeries(t, scrapePath(t, m, "/metrics/cadvisor"), map[string]string{
		`container_network_receive_bytes_total{container="",id="1",image="",interface="eth0",name="1",namespace="n",pod="p"}`: "5 1700000000123",
		`container_cpu_usage_seconds_total{container="c",cpu="total",id="2",image="i",name="2",namespace="n",pod="p"}`:        "1.5 1700000000123",
		`container_memory_rss{container="c",id="2",image="i",name="2",namespace="n",pod="p"}`:                                 "4096 1700000000123",
	})
}

func TestListen(t *testing.T) {
	m := New(Config{Pods: func() []*node.Pod { return nil }})
	limiter := connlimit.NewGroup(slog.New(slog.DiscardHandler)).Limiter("metrics", connlimit.Config{})
	addr, err := m.Listen(t.Context(), "127.0.0.1:0", limiter)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get("http://" + addr.String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if !strings.Contains(string(body), "go_goroutines") {
		t.Errorf("GET /metrics returned %s, want go_goroutines in it", body)
	}
	if _, err := New(Config{}).Listen(t.Context(), addr.String(), limiter); !errdefs.IsUnavailable(err) {
		t.Errorf("Listen on an address in use = %v, want unavailable", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if _, err := http.Get("http://" + addr.String() + "/metrics"); err == nil {
		t.Error("the server still answers after Close")
	}
}

// sink is an OpenTelemetry collector. If hold is not nil, it answers once hold is closed.
type sink struct {
	collector.UnimplementedTraceServiceServer
	mu   sync.Mutex
	got  []string
	hold chan struct{}
}

func (s *sink) Export(ctx context.Context, r *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	if s.hold != nil {
		select {
		case <-s.hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, rs := range r.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, span := range ss.Spans {
				s.got = append(s.got, rs.Resource.Attributes[0].Value.GetStringValue()+" "+span.Name)
			}
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

func (s *sink) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got
}

func startSink(t *testing.T, s *sink) (endpoint string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, s)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return "http://" + l.Addr().String()
}

func batch(t *testing.T, resource, span string) []byte {
	t.Helper()
	raw, err := proto.Marshal(&collector.ExportTraceServiceRequest{ResourceSpans: []*trace.ResourceSpans{{
		ScopeSpans: []*trace.ScopeSpans{{Spans: []*trace.Span{{Name: span}}}}, Resource: resourceOf(resource),
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestSpansReachTheCollector(t *testing.T) {
	s := &sink{}
	tracing, err := NewTracing(t.Context(), startSink(t, s), "v1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	tracing.Forward(batch(t, "a:b@1.0.0", "foo.Bar/Do"))
	for deadline := time.Now().Add(10 * time.Second); len(s.names()) == 0; time.Sleep(time.Millisecond) { // pacing of a poll
		if time.Now().After(deadline) {
			t.Fatal("no span arrived within 10 s")
		}
	}
	tracing.Forward([]byte("no message"))
	tracing.Forward(batch(t, "a:b@1.0.0", "last")) // in transit when the daemon stops
	if err := tracing.Close(); err != nil {
		t.Error(err)
	}
	if got := strings.Join(s.names(), ", "); got != "a:b@1.0.0 foo.Bar/Do, a:b@1.0.0 last" {
		t.Errorf("the collector got %s, want both spans", got)
	}
}

// TestCollectorThatHangs checks that a hanging collector delays neither Forward nor Close, and that the queue is
// bounded.
func TestCollectorThatHangs(t *testing.T) {
	s := &sink{hold: make(chan struct{})}
	tracing, err := NewTracing(t.Context(), startSink(t, s), "v1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	m := New(Config{Pods: func() []*node.Pod { return nil }})
	m.Register(tracing.Dropped())
	begin := time.Now()
	for range 2 * maxBatches {
		tracing.Forward(batch(t, "a", "b"))
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("Forward took %v in total, want at most 5 s", took)
	}
	_, span := tracing.spans.Tracer("test").Start(t.Context(), "runtime.v1.RuntimeService/RunPodSandbox")
	span.End() // the daemon's own
	if got := scrape(t, m)["tripod_span_batches_dropped_total"]; got == "0" || got == "" {
		t.Errorf("%q batches were dropped, want more than 0", got)
	}
	begin = time.Now()
	_ = tracing.Close()
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("Close took %v, want at most 5 s", took)
	}
}

func TestBadEndpoints(t *testing.T) {
	for _, endpoint := range []string{"", "localhost:4317", "http://localhost", "ftp://localhost:1", "::"} {
		if _, err := NewTracing(t.Context(), endpoint, "v1", slog.New(slog.DiscardHandler)); !errdefs.IsInvalidArgument(err) {
			t.Errorf("NewTracing(%q) = %v, want an invalid argument", endpoint, err)
		}
	}
}

func resourceOf(service string) *resource.Resource {
	return &resource.Resource{Attributes: []*common.KeyValue{{Key: "service.name",
		Value: &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: service}}}}}
}
