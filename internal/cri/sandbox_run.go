package cri

import (
	"context"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// RunPodSandbox makes a pod with its network and returns once the pod is ready.
func (s *Server) RunPodSandbox(ctx context.Context, req *runtimeapi.RunPodSandboxRequest) (*runtimeapi.RunPodSandboxResponse, error) {
	if err := validateSandboxConfig(req.GetConfig()); err != nil {
		return nil, err
	}
	if err := s.checkHandler("runtime_handler", req.GetRuntimeHandler()); err != nil {
		return nil, err
	}
	id, err := s.node.RunSandbox(ctx, req.GetConfig(), req.GetRuntimeHandler())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.RunPodSandboxResponse{PodSandboxId: id}, nil
}

// checkHandler rejects a RuntimeClass handler that this node does not have. It accepts "", the default handler.
func (s *Server) checkHandler(field, name string) error {
	if name == "" {
		return nil
	}
	handlers := s.node.Handlers()
	names := make([]string, len(handlers))
	for i, h := range handlers {
		if h.Name == name {
			return nil
		}
		names[i] = h.Name
	}
	if err := s.node.CheckMissing(name); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	return invalid(field, "no runtime for handler %q is configured, only for %q; node.handler_aliases in the configuration adds names for them", name, names)
}
