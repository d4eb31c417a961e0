package cri

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// PortForward returns the URL of a session that connects to ports of the pod.
func (s *Server) PortForward(_ context.Context, req *runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error) {
	if req.GetPodSandboxId() == "" {
		return nil, required("pod_sandbox_id")
	}
	for i, port := range req.GetPort() {
		if err := validatePort(fmt.Sprintf("port[%d]", i), port, 1); err != nil {
			return nil, err
		}
	}
	pod, err := s.node.Pod(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if !pod.Ready() {
		return nil, fmt.Errorf("PortForward: pod %s is %s, not Initiated: %w", pod.ID, pod.State, errdefs.ErrFailedPrecondition)
	}
	return s.streams.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.ID, Port: req.GetPort()})
}
