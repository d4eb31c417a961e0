package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// ListContainerStats returns the statistics of the running containers that match the filter. It omits containers whose
// statistics cannot be read.
func (s *Server) ListContainerStats(ctx context.Context,
	req *runtimeapi.ListContainerStatsRequest) (*runtimeapi.ListContainerStatsResponse, error) {
	stats, err := s.containerStatsOf(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ListContainerStatsResponse{Stats: stats}, nil
}

// StreamContainerStats is like ListContainerStats, without a size limit.
func (s *Server) StreamContainerStats(req *runtimeapi.StreamContainerStatsRequest,
	stream runtimeapi.RuntimeService_StreamContainerStatsServer) error {
	stats, err := s.containerStatsOf(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return sendMessages(stats, func(chunk []*runtimeapi.ContainerStats) error {
		return stream.Send(&runtimeapi.StreamContainerStatsResponse{ContainerStats: chunk})
	})
}

func (s *Server) containerStatsOf(ctx context.Context, f *runtimeapi.ContainerStatsFilter) ([]*runtimeapi.ContainerStats, error) {
	containers, err := s.selectContainers(ctx, f.GetId(), f.GetPodSandboxId(), f.GetLabelSelector(), isRunning)
	if err != nil {
		return nil, err
	}
	return s.node.ContainersStats(ctx, containers), nil
}

func isRunning(c *node.Container) bool {
	return containerState(c) == runtimeapi.ContainerState_CONTAINER_RUNNING
}
