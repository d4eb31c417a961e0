package cri

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// notImplemented returns the error of an RPC that the node does not implement. The second argument says what the caller
// can do instead.
func notImplemented(what, instead string) error {
	return fmt.Errorf("%s: not in this version of tripod; %s: %w", what, instead, errdefs.ErrNotImplemented)
}

var (
	errCheckpoint = notImplemented("checkpoint and restore of containers and pods (no backend can freeze and save processes)", "stop the pod and create it again")
	errMetrics    = notImplemented("pod metrics (descriptors and values in Prometheus form)", "use ListPodSandboxStats and ListContainerStats")
)

func (s *Server) CheckpointContainer(context.Context, *runtimeapi.CheckpointContainerRequest) (*runtimeapi.CheckpointContainerResponse, error) {
	return nil, errCheckpoint
}

func (s *Server) CheckpointPod(context.Context, *runtimeapi.CheckpointPodRequest) (*runtimeapi.CheckpointPodResponse, error) {
	return nil, errCheckpoint
}

func (s *Server) RestorePod(context.Context, *runtimeapi.RestorePodRequest) (*runtimeapi.RestorePodResponse, error) {
	return nil, errCheckpoint
}

func (s *Server) ListMetricDescriptors(context.Context, *runtimeapi.ListMetricDescriptorsRequest) (*runtimeapi.ListMetricDescriptorsResponse, error) {
	return nil, errMetrics
}

func (s *Server) ListPodSandboxMetrics(context.Context, *runtimeapi.ListPodSandboxMetricsRequest) (*runtimeapi.ListPodSandboxMetricsResponse, error) {
	return nil, errMetrics
}

func (s *Server) StreamPodSandboxMetrics(*runtimeapi.StreamPodSandboxMetricsRequest, runtimeapi.RuntimeService_StreamPodSandboxMetricsServer) error {
	return errMetrics
}
