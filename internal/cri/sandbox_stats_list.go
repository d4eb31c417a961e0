package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// ListPodSandboxStats returns the statistics of the ready pods that match the filter. It omits pods whose statistics
// cannot be read.
func (s *Server) ListPodSandboxStats(ctx context.Context,
	req *runtimeapi.ListPodSandboxStatsRequest) (*runtimeapi.ListPodSandboxStatsResponse, error) {
	stats, err := s.podStatsOf(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ListPodSandboxStatsResponse{Stats: stats}, nil
}

// StreamPodSandboxStats is like ListPodSandboxStats, without a size limit.
func (s *Server) StreamPodSandboxStats(req *runtimeapi.StreamPodSandboxStatsRequest,
	stream runtimeapi.RuntimeService_StreamPodSandboxStatsServer) error {
	stats, err := s.podStatsOf(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return sendMessages(stats, func(chunk []*runtimeapi.PodSandboxStats) error {
		return stream.Send(&runtimeapi.StreamPodSandboxStatsResponse{PodSandboxStats: chunk})
	})
}

func (s *Server) podStatsOf(ctx context.Context, f *runtimeapi.PodSandboxStatsFilter) ([]*runtimeapi.PodSandboxStats, error) {
	pods, err := s.selectPods(ctx, f.GetId(), f.GetLabelSelector(), (*node.Pod).Ready)
	if err != nil {
		return nil, err
	}
	return s.node.PodsStats(ctx, pods), nil
}
