package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// ListContainers lists the containers that match the filter, pod by pod, in order of creation.
func (s *Server) ListContainers(ctx context.Context, req *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	items, err := s.containersOf(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	if err := checkFits(items, "StreamContainers"); err != nil {
		return nil, err
	}
	return withItems(&runtimeapi.ListContainersResponse{}, items), nil
}

// StreamContainers is like ListContainers, without a size limit.
func (s *Server) StreamContainers(req *runtimeapi.StreamContainersRequest, stream runtimeapi.RuntimeService_StreamContainersServer) error {
	items, err := s.containersOf(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return sendWire(items, func(chunk []wireItem) error {
		return stream.Send(withItems(&runtimeapi.StreamContainersResponse{}, chunk))
	})
}

func (s *Server) containersOf(ctx context.Context, f *runtimeapi.ContainerFilter) ([]wireItem, error) {
	if err := validateEnum("filter.state", f.GetState().GetState(), runtimeapi.ContainerState_name); err != nil {
		return nil, err
	}
	selected := func() ([]*node.Container, error) {
		return s.selectContainers(ctx, f.GetId(), f.GetPodSandboxId(), f.GetLabelSelector(), func(c *node.Container) bool {
			return f.GetState() == nil || containerState(c) == f.GetState().GetState()
		})
	}
	full := f.GetId() == "" && f.GetPodSandboxId() == "" && f.GetState() == nil && len(f.GetLabelSelector()) == 0
	return wireItems(ctx, s, &s.containerWire, full, selected, containerItem)
}
