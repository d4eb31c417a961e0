package cri

import (
	"context"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// ListPodSandboxMetrics returns the metrics of the ready pods and their running containers. It omits what cannot be
// measured.
func (s *Server) ListPodSandboxMetrics(ctx context.Context,
	_ *runtimeapi.ListPodSandboxMetricsRequest) (*runtimeapi.ListPodSandboxMetricsResponse, error) {
	return &runtimeapi.ListPodSandboxMetricsResponse{PodMetrics: s.podMetrics(ctx)}, nil
}

// StreamPodSandboxMetrics is like ListPodSandboxMetrics, without a size limit.
func (s *Server) StreamPodSandboxMetrics(_ *runtimeapi.StreamPodSandboxMetricsRequest,
	stream runtimeapi.RuntimeService_StreamPodSandboxMetricsServer) error {
	return sendMessages(s.podMetrics(stream.Context()), func(chunk []*runtimeapi.PodSandboxMetrics) error {
		return stream.Send(&runtimeapi.StreamPodSandboxMetricsResponse{PodSandboxMetrics: chunk})
	})
}

func (s *Server) podMetrics(ctx context.Context) []*runtimeapi.PodSandboxMetrics {
	pods := s.node.Samples(ctx)
	all := make([]*runtimeapi.PodSandboxMetrics, 0, len(pods))
	for _, p := range pods {
		m := &runtimeapi.PodSandboxMetrics{PodSandboxId: p.Owner.ID, Metrics: metricsOf(p.ObjectSamples)}
		for _, c := range p.Containers {
			m.ContainerMetrics = append(m.ContainerMetrics, &runtimeapi.ContainerMetrics{ContainerId: c.Owner.ID, Metrics: metricsOf(c)})
		}
		all = append(all, m)
	}
	return all
}

// metricsOf converts samples. Values become whole numbers, also those in seconds, because the CRI has no others.
func metricsOf(o node.ObjectSamples) []*runtimeapi.Metric {
	base, at := o.Owner.Labels(), o.Time.UnixNano()
	metrics := make([]*runtimeapi.Metric, 0, len(o.Samples))
	for _, s := range o.Samples {
		metrics = append(metrics, &runtimeapi.Metric{
			Name: s.Family.Name, Timestamp: at, MetricType: s.Family.Type, LabelValues: slices.Concat(base, s.Labels),
			Value: &runtimeapi.UInt64Value{Value: uint64(s.Value)},
		})
	}
	return metrics
}
