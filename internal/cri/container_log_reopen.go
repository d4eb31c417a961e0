package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ReopenContainerLog makes the container write to a new file at its log path, after the old file was moved away.
func (s *Server) ReopenContainerLog(ctx context.Context,
	req *runtimeapi.ReopenContainerLogRequest) (*runtimeapi.ReopenContainerLogResponse, error) {
	if req.GetContainerId() == "" {
		return nil, required("container_id")
	}
	if err := s.node.ReopenLog(ctx, req.GetContainerId()); err != nil {
		return nil, err
	}
	return &runtimeapi.ReopenContainerLogResponse{}, nil
}
