package cri

import (
	"context"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// PodSandboxStatus describes one pod and, for the kubelet's evented PLEG, its containers at the same moment.
func (s *Server) PodSandboxStatus(ctx context.Context,
	req *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	if req.GetPodSandboxId() == "" {
		return nil, required("pod_sandbox_id")
	}
	// Take the time before the snapshot, so that the statuses are at least as new as the timestamp.
	now := time.Now()
	pod, err := s.node.Pod(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	resp := &runtimeapi.PodSandboxStatusResponse{
		Status: sandboxStatus(pod), ContainersStatuses: containerStatuses(pod), Timestamp: now.UnixNano(),
	}
	if req.GetVerbose() {
		if resp.Info, err = s.node.Inspect(ctx, pod.ID, ""); err != nil {
			return nil, err
		}
	}
	return resp, nil
}
