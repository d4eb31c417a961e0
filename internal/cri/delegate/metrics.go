package delegate

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
)

// A metric's values have the values of labels, but not their names: these are in the metric's descriptor, for which a
// kubelet asks once. The runtimes of a node order the labels of one metric differently, and not all have the same. The
// answer has one descriptor per metric, with this node's labels first and then those that only endpoints have, and each
// value is arranged for it.

// labelKeys are the names of metrics' labels, in the order of their values.
type labelKeys map[string][]string

func keysOf(descriptors []*runtimeapi.MetricDescriptor) labelKeys {
	keys := labelKeys{}
	for _, d := range descriptors {
		keys[d.GetName()] = d.GetLabelKeys()
	}
	return keys
}

// metricDescriptors answers ListMetricDescriptors.
func (r *Router) metricDescriptors(ctx context.Context) (proto.Message, error) {
	return &runtimeapi.ListMetricDescriptorsResponse{Descriptors: r.joinDescriptors(r.describeMetrics(ctx))}, nil
}

// described are the metric descriptors of each endpoint, and under nil this node's.
type described map[*endpoint][]*runtimeapi.MetricDescriptor

// describeMetrics collects all descriptors. Endpoints that have not answered yet are left out: a descriptor is not a
// pod.
func (r *Router) describeMetrics(ctx context.Context) described {
	theirs := make([][]*runtimeapi.MetricDescriptor, len(r.endpoints))
	var all guard.Group
	for i, e := range r.endpoints {
		all.Go(func() error { theirs[i] = e.metricDescriptors(ctx); return nil })
	}
	_ = all.Wait() // the parts return nil
	d := described{nil: r.metrics}
	for i, e := range r.endpoints {
		d[e] = theirs[i]
	}
	return d
}

// joinDescriptors returns one descriptor per metric.
func (r *Router) joinDescriptors(from described) []*runtimeapi.MetricDescriptor {
	joined := slices.Clone(from[nil])
	at := map[string]int{}
	for i, d := range joined {
		at[d.GetName()] = i
	}
	for _, e := range r.endpoints {
		for _, d := range from[e] {
			i, known := at[d.GetName()]
			if !known {
				at[d.GetName()] = len(joined)
				joined = append(joined, d)
				continue
			}
			keys := union(slices.Clone(joined[i].GetLabelKeys()), d.GetLabelKeys())
			joined[i] = &runtimeapi.MetricDescriptor{Name: joined[i].GetName(), Help: joined[i].GetHelp(), LabelKeys: keys}
		}
	}
	return joined
}

// metricDescriptors returns the endpoint's descriptors. It asks once, also if there are none, and again after the
// endpoint was away, because it may then be another version.
func (e *endpoint) metricDescriptors(ctx context.Context) []*runtimeapi.MetricDescriptor {
	e.mu.Lock()
	known := e.metrics
	e.mu.Unlock()
	if known != nil {
		return known
	}
	known = []*runtimeapi.MetricDescriptor{}
	reply, err := e.read(ctx, runtimeapi.RuntimeService_ListMetricDescriptors_FullMethodName, &runtimeapi.ListMetricDescriptorsRequest{})
	switch {
	case err == nil:
		known = append(known, reply.(*runtimeapi.ListMetricDescriptorsResponse).GetDescriptors()...)
	case status.Code(err) != codes.Unimplemented:
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.metrics = known
	return known
}

// mergeMetrics arranges the values of all pods for the joined descriptors.
func mergeMetrics(ctx context.Context, r *Router, parts []part) []proto.Message {
	from := r.describeMetrics(ctx)
	wanted := keysOf(r.joinDescriptors(from))
	var merged []proto.Message
	for _, p := range parts {
		o := newOrder(keysOf(from[p.endpoint]), wanted)
		for _, m := range p.items {
			merged = append(merged, o.pod(m.(*runtimeapi.PodSandboxMetrics)))
		}
	}
	return merged
}

// order says for each metric which of the given labels is each of the wanted ones; -1 if there is no such label.
type order map[string]struct {
	given  int
	wanted []int
}

// newOrder leaves out metrics with labels that are not wanted: without them, two values could look the same, and a
// kubelet would refuse all.
func newOrder(given, wanted labelKeys) order {
	o := order{}
	for name, keys := range given {
		at, all := []int{}, true
		for _, key := range wanted[name] {
			at = append(at, slices.Index(keys, key))
		}
		for _, key := range keys {
			all = all && slices.Contains(wanted[name], key)
		}
		if all {
			entry := o[name]
			entry.given, entry.wanted = len(keys), at
			o[name] = entry
		}
	}
	return o
}

func (o order) pod(m *runtimeapi.PodSandboxMetrics) *runtimeapi.PodSandboxMetrics {
	p := &runtimeapi.PodSandboxMetrics{PodSandboxId: m.GetPodSandboxId(), Metrics: o.metrics(m.GetMetrics())}
	for _, c := range m.GetContainerMetrics() {
		p.ContainerMetrics = append(p.ContainerMetrics,
			&runtimeapi.ContainerMetrics{ContainerId: c.GetContainerId(), Metrics: o.metrics(c.GetMetrics())})
	}
	return p
}

// metrics leaves out values that nobody has described.
func (o order) metrics(all []*runtimeapi.Metric) []*runtimeapi.Metric {
	arranged := make([]*runtimeapi.Metric, 0, len(all))
	for _, m := range all {
		entry, known := o[m.GetName()]
		if !known || entry.given != len(m.GetLabelValues()) {
			continue
		}
		values := make([]string, len(entry.wanted))
		for i, at := range entry.wanted {
			if at >= 0 {
				values[i] = m.GetLabelValues()[at]
			}
		}
		arranged = append(arranged, &runtimeapi.Metric{
			Name: m.GetName(), Timestamp: m.GetTimestamp(), MetricType: m.GetMetricType(), LabelValues: values, Value: m.GetValue(),
		})
	}
	return arranged
}
