package cri

import (
	"context"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/stats"
)

// ListMetricDescriptors returns the names and labels of all metrics that ListPodSandboxMetrics can return. A kubelet asks
// once, when it starts.
func (s *Server) ListMetricDescriptors(context.Context,
	*runtimeapi.ListMetricDescriptorsRequest) (*runtimeapi.ListMetricDescriptorsResponse, error) {
	return &runtimeapi.ListMetricDescriptorsResponse{Descriptors: metricDescriptors()}, nil
}

func metricDescriptors() []*runtimeapi.MetricDescriptor {
	descriptors := make([]*runtimeapi.MetricDescriptor, 0, len(stats.Families))
	for _, f := range stats.Families {
		descriptors = append(descriptors, &runtimeapi.MetricDescriptor{
			Name: f.Name, Help: f.Help, LabelKeys: slices.Concat(stats.BaseLabels, f.Labels),
		})
	}
	return descriptors
}
