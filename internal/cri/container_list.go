package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// ListContainers lists the containers that match the filter, pod by pod in the order of their creation.
func (s *Server) ListContainers(_ context.Context, req *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	containers, err := s.containersOf(req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ListContainersResponse{Containers: containerItems(containers)}, nil
}

// StreamContainers is ListContainers without a limit to its size.
func (s *Server) StreamContainers(req *runtimeapi.StreamContainersRequest, stream runtimeapi.RuntimeService_StreamContainersServer) error {
	containers, err := s.containersOf(req.GetFilter())
	if err != nil {
		return err
	}
	return sendInChunks(containerItems(containers), func(chunk []*runtimeapi.Container) error {
		return stream.Send(&runtimeapi.StreamContainersResponse{Containers: chunk})
	})
}

func (s *Server) containersOf(f *runtimeapi.ContainerFilter) ([]*node.Container, error) {
	if err := validateContainerState("filter.state", f.GetState()); err != nil {
		return nil, err
	}
	return s.selectContainers(f.GetId(), f.GetPodSandboxId(), f.GetLabelSelector(), func(c *node.Container) bool {
		return f.GetState() == nil || containerState(c) == f.GetState().GetState()
	})
}
