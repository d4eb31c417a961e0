package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// ListPodSandbox lists the pods that match the filter, in the order of their creation.
func (s *Server) ListPodSandbox(_ context.Context, req *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	pods, err := s.podsOf(req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ListPodSandboxResponse{Items: sandboxItems(pods)}, nil
}

// StreamPodSandboxes is ListPodSandbox without a limit to its size.
func (s *Server) StreamPodSandboxes(req *runtimeapi.StreamPodSandboxesRequest, stream runtimeapi.RuntimeService_StreamPodSandboxesServer) error {
	pods, err := s.podsOf(req.GetFilter())
	if err != nil {
		return err
	}
	return sendInChunks(sandboxItems(pods), func(chunk []*runtimeapi.PodSandbox) error {
		return stream.Send(&runtimeapi.StreamPodSandboxesResponse{PodSandboxes: chunk})
	})
}

func (s *Server) podsOf(f *runtimeapi.PodSandboxFilter) ([]*node.Pod, error) {
	if err := validateSandboxState("filter.state", f.GetState()); err != nil {
		return nil, err
	}
	return s.selectPods(f.GetId(), f.GetLabelSelector(), func(p *node.Pod) bool {
		return f.GetState() == nil || sandboxState(p) == f.GetState().GetState()
	})
}
