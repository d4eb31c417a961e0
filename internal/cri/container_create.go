package cri

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/internal/node"
)

// CreateContainer prepares a container in a pod without running it. It ignores the request's sandbox_config, because
// the node has its own copy from RunPodSandbox.
func (s *Server) CreateContainer(ctx context.Context, req *runtimeapi.CreateContainerRequest) (*runtimeapi.CreateContainerResponse, error) {
	if req.GetPodSandboxId() == "" {
		return nil, required("pod_sandbox_id")
	}
	if err := validateContainerConfig(req.GetConfig()); err != nil {
		return nil, err
	}
	if err := s.checkImageHandler("config.image", req.GetConfig().GetImage()); err != nil {
		return nil, err
	}
	pod, err := s.node.Pod(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if err := s.checkAgainstPod(pod, req.GetConfig()); err != nil {
		return nil, err
	}
	id, err := s.node.CreateContainer(ctx, pod.ID, req.GetConfig())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.CreateContainerResponse{ContainerId: id}, nil
}

// checkAgainstPod rejects what the API forbids in this pod: a privileged container in an unprivileged pod, a namespace
// target outside the pod, and recursive read-only mounts that the handler does not support.
func (s *Server) checkAgainstPod(pod *node.Pod, c *runtimeapi.ContainerConfig) error {
	sc := c.GetLinux().GetSecurityContext()
	if sc.GetPrivileged() && !pod.Config.GetLinux().GetSecurityContext().GetPrivileged() {
		return invalid("config.linux.security_context.privileged", "pod %s is not privileged: set privileged in its own security context", pod.ID)
	}
	if t := sc.GetNamespaceOptions().GetTargetId(); t != "" && pod.Container(t) == nil {
		return invalid("config.linux.security_context.namespace_options.target_id", "pod %s has no container %q", pod.ID, t)
	}
	for i, m := range c.GetMounts() {
		if m.GetRecursiveReadOnly() && !s.recursiveReadOnly(pod.Handler) {
			return fmt.Errorf("%w: config.mounts[%d].recursive_read_only: handler %q does not support recursive read-only mounts: %w",
				crierrors.ErrRROUnsupported, i, pod.Handler, errdefs.ErrNotImplemented)
		}
	}
	return nil
}

func (s *Server) recursiveReadOnly(handler string) bool {
	_, can, err := s.node.Handler(handler)
	return err == nil && can.RecursiveReadOnlyMounts
}
