package cri

import (
	"cmp"
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// UpdateContainerResources changes the resources of a created or running container in place (KEP-1287). It ignores the
// request's annotations, which are for other runtimes' experiments.
func (s *Server) UpdateContainerResources(ctx context.Context, req *runtimeapi.UpdateContainerResourcesRequest) (*runtimeapi.UpdateContainerResourcesResponse, error) {
	if err := validateUpdate(req); err != nil {
		return nil, err
	}
	if err := s.node.UpdateContainer(ctx, req.GetContainerId(), req.GetLinux()); err != nil {
		return nil, err
	}
	return &runtimeapi.UpdateContainerResourcesResponse{}, nil
}

func validateUpdate(req *runtimeapi.UpdateContainerResourcesRequest) error {
	switch {
	case req.GetContainerId() == "":
		return required("container_id")
	case req.GetWindows() != nil:
		return invalid("windows", "this node runs Linux")
	case req.GetLinux() == nil:
		return required("linux")
	}
	return cmp.Or(
		validateResources("linux", req.GetLinux()),
		validateKeyValues("annotations", req.GetAnnotations()),
	)
}
