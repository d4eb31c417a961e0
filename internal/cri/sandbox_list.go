package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// ListPodSandbox lists the pods that match the filter, in order of creation.
func (s *Server) ListPodSandbox(ctx context.Context, req *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	items, err := s.podsOf(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	if err := checkFits(items, "StreamPodSandboxes"); err != nil {
		return nil, err
	}
	return withItems(&runtimeapi.ListPodSandboxResponse{}, items), nil
}

// StreamPodSandboxes is like ListPodSandbox, without a size limit.
func (s *Server) StreamPodSandboxes(req *runtimeapi.StreamPodSandboxesRequest,
	stream runtimeapi.RuntimeService_StreamPodSandboxesServer) error {
	items, err := s.podsOf(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return sendWire(items, func(chunk []wireItem) error {
		return stream.Send(withItems(&runtimeapi.StreamPodSandboxesResponse{}, chunk))
	})
}

func (s *Server) podsOf(ctx context.Context, f *runtimeapi.PodSandboxFilter) ([]wireItem, error) {
	if err := validateEnum("filter.state", f.GetState().GetState(), runtimeapi.PodSandboxState_name); err != nil {
		return nil, err
	}
	selected := func() ([]*node.Pod, error) {
		return s.selectPods(ctx, f.GetId(), f.GetLabelSelector(), func(p *node.Pod) bool {
			return f.GetState() == nil || sandboxState(p) == f.GetState().GetState()
		})
	}
	full := f.GetId() == "" && f.GetState() == nil && len(f.GetLabelSelector()) == 0
	return wireItems(ctx, s, &s.podWire, full, selected, sandboxItem)
}
