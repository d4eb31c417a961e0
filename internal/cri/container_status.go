package cri

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ContainerStatus describes one container.
func (s *Server) ContainerStatus(ctx context.Context, req *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	if req.GetContainerId() == "" {
		return nil, required("container_id")
	}
	c, pod, err := s.node.Container(req.GetContainerId())
	if err == nil && c.Unlisted {
		err = fmt.Errorf("container %s was removed: %w", c.ID, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	resp := &runtimeapi.ContainerStatusResponse{Status: containerStatus(pod, c)}
	if req.GetVerbose() {
		if resp.Info, err = s.node.Inspect(ctx, pod.ID, c.ID); err != nil {
			return nil, err
		}
	}
	return resp, nil
}
