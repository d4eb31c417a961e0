package cri

import (
	"cmp"
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// UpdatePodSandboxResources changes the resources and the overhead of a whole pod in place (KEP-1287, KEP-5419). A
// kubelet continues its resize if the error is Unimplemented; every other error ends the resize.
func (s *Server) UpdatePodSandboxResources(ctx context.Context,
	req *runtimeapi.UpdatePodSandboxResourcesRequest) (*runtimeapi.UpdatePodSandboxResourcesResponse, error) {
	if req.GetPodSandboxId() == "" {
		return nil, required("pod_sandbox_id")
	}
	err := cmp.Or(validateResources("resources", req.GetResources()), validateResources("overhead", req.GetOverhead()))
	if err == nil {
		err = s.node.UpdateSandbox(ctx, req.GetPodSandboxId(), req.GetResources(), req.GetOverhead())
	}
	if err != nil {
		return nil, err
	}
	return &runtimeapi.UpdatePodSandboxResourcesResponse{}, nil
}
