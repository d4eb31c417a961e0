package cri

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// errCheckpoint is the answer of the calls that the node does not implement.
var errCheckpoint = fmt.Errorf("checkpoint and restore of containers and pods (no backend can freeze and save processes): "+
	"not in this version of tripod; stop the pod and create it again: %w", errdefs.ErrNotImplemented)

func (s *Server) CheckpointContainer(context.Context,
	*runtimeapi.CheckpointContainerRequest) (*runtimeapi.CheckpointContainerResponse, error) {
	return nil, errCheckpoint
}

func (s *Server) CheckpointPod(context.Context, *runtimeapi.CheckpointPodRequest) (*runtimeapi.CheckpointPodResponse, error) {
	return nil, errCheckpoint
}

func (s *Server) RestorePod(context.Context, *runtimeapi.RestorePodRequest) (*runtimeapi.RestorePodResponse, error) {
	return nil, errCheckpoint
}
