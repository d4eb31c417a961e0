package delegate

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestMergeMetrics: each value of a label stays under its name, whatever the order of the runtimes is.
func TestMergeMetrics(t *testing.T) {
	describe := func(name string, keys ...string) *runtimeapi.MetricDescriptor {
		return &runtimeapi.MetricDescriptor{Name: name, LabelKeys: keys}
	}
	value := func(name string, labels ...string) *runtimeapi.Metric {
		return &runtimeapi.Metric{Name: name, LabelValues: labels, Timestamp: 7, Value: &runtimeapi.UInt64Value{Value: 1}}
	}
	back := &endpoint{metrics: []*runtimeapi.MetricDescriptor{
		describe("cpu", "id", "pod", "node"), describe("theirs", "id"), describe("same", "pod", "id"),
	}}
	r := &Router{
		metrics:   []*runtimeapi.MetricDescriptor{describe("cpu", "pod", "id"), describe("same", "pod", "id"), describe("ours", "pod")},
		endpoints: []*endpoint{back},
	}
	got, want := keysOf(r.joinDescriptors(r.describeMetrics(t.Context()))), labelKeys{
		"cpu": {"pod", "id", "node"}, "same": {"pod", "id"}, "ours": {"pod"}, "theirs": {"id"},
	}
	if len(got) != len(want) {
		t.Errorf("descriptors = %v, want %v", got, want)
	}
	for name, keys := range want {
		if a, b := describe(name, got[name]...), describe(name, keys...); !proto.Equal(a, b) {
			t.Errorf("labels of %s = %v, want %v", name, got[name], keys)
		}
	}
	for _, c := range []struct {
		endpoint *endpoint
		given    []*runtimeapi.Metric
		want     []*runtimeapi.Metric
	}{
		{nil, []*runtimeapi.Metric{value("cpu", "p", "1"), value("ours", "p")},
			[]*runtimeapi.Metric{value("cpu", "p", "1", ""), value("ours", "p")}},
		{back, []*runtimeapi.Metric{value("cpu", "1", "p", "n"), value("same", "p", "1"), value("theirs", "1"), value("unknown", "x"),
			value("cpu", "1")},
			[]*runtimeapi.Metric{value("cpu", "p", "1", "n"), value("same", "p", "1"), value("theirs", "1")}},
	} {
		pod := func(m []*runtimeapi.Metric) *runtimeapi.PodSandboxMetrics {
			return &runtimeapi.PodSandboxMetrics{PodSandboxId: "p", Metrics: m,
				ContainerMetrics: []*runtimeapi.ContainerMetrics{{ContainerId: "1", Metrics: m}}}
		}
		got := mergeMetrics(t.Context(), r, []part{{c.endpoint, []proto.Message{pod(c.given)}}})
		if !proto.Equal(got[0], pod(c.want)) {
			t.Errorf("arranged %v, want %v", got[0], pod(c.want))
		}
	}
	if o := newOrder(labelKeys{"cpu": {"id", "node"}}, labelKeys{"cpu": {"id"}}); len(o) != 0 {
		t.Errorf("a metric with a label that the client does not know is kept: %v", o)
	}
}

// describer is an endpoint that counts the questions for its descriptors, and answers them with err.
type describer struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	asked atomic.Int32
	err   error
}

func (d *describer) ListMetricDescriptors(context.Context,
	*runtimeapi.ListMetricDescriptorsRequest) (*runtimeapi.ListMetricDescriptorsResponse, error) {
	d.asked.Add(1)
	return &runtimeapi.ListMetricDescriptorsResponse{}, d.err
}

func (d *describer) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{}, nil
}

// TestDescriptorsAreAskedOnce: an endpoint without metrics is not asked again for each scrape, but after it was away.
func TestDescriptorsAreAskedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want int32
	}{
		"none":          {nil, 1},
		"unimplemented": {status.Error(codes.Unimplemented, "old"), 1},
		"failing":       {status.Error(codes.Internal, "busy"), 3},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "cri.sock")
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			d, s := &describer{err: c.err}, grpc.NewServer()
			runtimeapi.RegisterRuntimeServiceServer(s, d)
			go func() { _ = s.Serve(l) }()
			t.Cleanup(s.Stop)
			e, err := newEndpoint(Endpoint{Name: "back", Runtime: socket, Images: socket, Timeout: time.Minute}, 1<<20,
				slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = e.close() })
			r := &Router{endpoints: []*endpoint{e}}
			scrape := func(want int32) {
				t.Helper()
				for range 3 {
					mergeMetrics(t.Context(), r, []part{{}, {endpoint: e}})
				}
				if got := d.asked.Load(); got != want {
					t.Errorf("asked %d times, want %d", got, want)
				}
			}
			scrape(c.want)
			e.markAway(e.silence())
			if err := e.probe(t.Context()); err != nil {
				t.Fatal(err)
			}
			scrape(2 * c.want)
		})
	}
}
