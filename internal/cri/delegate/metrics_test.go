package delegate

import (
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestArrangeMetrics: each value of a label stays under its name, whatever the order of the runtimes is.
func TestArrangeMetrics(t *testing.T) {
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
	got, want := keysOf(r.joinDescriptors(t.Context())), labelKeys{
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
		{nil, []*runtimeapi.Metric{value("cpu", "p", "1"), value("ours", "p")}, []*runtimeapi.Metric{value("cpu", "p", "1", ""), value("ours", "p")}},
		{back, []*runtimeapi.Metric{value("cpu", "1", "p", "n"), value("same", "p", "1"), value("theirs", "1"), value("unknown", "x"), value("cpu", "1")},
			[]*runtimeapi.Metric{value("cpu", "p", "1", "n"), value("same", "p", "1"), value("theirs", "1")}},
	} {
		pod := func(m []*runtimeapi.Metric) *runtimeapi.PodSandboxMetrics {
			return &runtimeapi.PodSandboxMetrics{PodSandboxId: "p", Metrics: m, ContainerMetrics: []*runtimeapi.ContainerMetrics{{ContainerId: "1", Metrics: m}}}
		}
		got := r.arrangeMetrics(t.Context(), c.endpoint, []proto.Message{pod(c.given)})
		if !proto.Equal(got[0], pod(c.want)) {
			t.Errorf("arranged %v, want %v", got[0], pod(c.want))
		}
	}
	if o := newOrder(labelKeys{"cpu": {"id", "node"}}, labelKeys{"cpu": {"id"}}); len(o) != 0 {
		t.Errorf("a metric with a label that the client does not know is kept: %v", o)
	}
}
