package cri

import (
	"cmp"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// The messages share labels, annotations and configurations with the node's immutable snapshots, without copies.

func sandboxStatus(p *node.Pod) *runtimeapi.PodSandboxStatus {
	return &runtimeapi.PodSandboxStatus{
		Id: p.ID, Metadata: p.Config.GetMetadata(), State: sandboxState(p), CreatedAt: nano(p.CreatedAt),
		Network: networkStatus(p),
		Linux: &runtimeapi.LinuxPodSandboxStatus{Namespaces: &runtimeapi.Namespace{
			Options: cmp.Or(p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions(), &runtimeapi.NamespaceOption{}),
		}},
		Labels: p.Config.GetLabels(), Annotations: p.Config.GetAnnotations(), RuntimeHandler: p.RuntimeHandler(),
	}
}

// networkStatus returns the addresses of a ready pod. A stopped pod has released its addresses.
func networkStatus(p *node.Pod) *runtimeapi.PodSandboxNetworkStatus {
	n := &runtimeapi.PodSandboxNetworkStatus{}
	if !p.Ready() {
		return n
	}
	for i, ip := range p.IPs {
		if i == 0 {
			n.Ip = ip.String()
			continue
		}
		n.AdditionalIps = append(n.AdditionalIps, &runtimeapi.PodIP{Ip: ip.String()})
	}
	return n
}

func sandboxState(p *node.Pod) runtimeapi.PodSandboxState {
	if p.Ready() {
		return runtimeapi.PodSandboxState_SANDBOX_READY
	}
	return runtimeapi.PodSandboxState_SANDBOX_NOTREADY
}

func sandboxItem(p *node.Pod) proto.Message {
	return &runtimeapi.PodSandbox{
		Id: p.ID, Metadata: p.Config.GetMetadata(), State: sandboxState(p), CreatedAt: nano(p.CreatedAt),
		Labels: p.Config.GetLabels(), Annotations: p.Config.GetAnnotations(), RuntimeHandler: p.RuntimeHandler(),
	}
}

func containerItem(c *node.Container) proto.Message {
	return &runtimeapi.Container{
		Id: c.ID, PodSandboxId: c.PodID, Metadata: c.Config.GetMetadata(),
		Image: requestedImage(c.Config.GetImage()), ImageRef: c.ImageID, ImageId: c.ImageID,
		State: containerState(c), CreatedAt: nano(c.CreatedAt), Labels: c.Config.GetLabels(), Annotations: c.Config.GetAnnotations(),
	}
}

func containerStatuses(p *node.Pod) []*runtimeapi.ContainerStatus {
	containers := p.Visible()
	statuses := make([]*runtimeapi.ContainerStatus, len(containers))
	for i, c := range containers {
		statuses[i] = containerStatus(p, c)
	}
	return statuses
}

// containerStatus describes a container in full. It includes start and exit data only in states that have such data, so
// a restarted container has no exit code.
func containerStatus(p *node.Pod, c *node.Container) *runtimeapi.ContainerStatus {
	s := &runtimeapi.ContainerStatus{
		Id: c.ID, Metadata: c.Config.GetMetadata(), State: containerState(c), CreatedAt: nano(c.CreatedAt),
		Image: requestedImage(c.Config.GetImage()), ImageRef: c.ImageID, ImageId: c.ImageID,
		Labels: c.Config.GetLabels(), Annotations: c.Config.GetAnnotations(), Mounts: c.Resolved.Mounts,
		LogPath: logPath(p.Config, c.Config), User: c.Resolved.User, StopSignal: c.Resolved.StopSignal,
	}
	if r := c.Config.GetLinux().GetResources(); r != nil {
		s.Resources = &runtimeapi.ContainerResources{Linux: effectiveResources(c, r)}
	}
	switch s.State {
	case runtimeapi.ContainerState_CONTAINER_RUNNING:
		s.StartedAt = nano(c.StartedAt)
	case runtimeapi.ContainerState_CONTAINER_EXITED:
		s.StartedAt, s.FinishedAt, s.ExitCode = nano(c.StartedAt), nano(c.FinishedAt), c.ExitCode
		s.Reason, s.Message = c.Reason, c.Message
	}
	return s
}

// effectiveResources adds the swap limit that follows from the requested resources.
func effectiveResources(c *node.Container, requested *runtimeapi.LinuxContainerResources) *runtimeapi.LinuxContainerResources {
	if !c.Resolved.SwapLimited || requested.GetMemoryLimitInBytes() == 0 || requested.GetMemorySwapLimitInBytes() != 0 {
		return requested
	}
	r := proto.CloneOf(requested)
	r.MemorySwapLimitInBytes = r.GetMemoryLimitInBytes()
	return r
}

// containerStates maps the node's states to the CRI's. A container is CREATED until it runs.
var containerStates = map[node.State]runtimeapi.ContainerState{
	node.Created:  runtimeapi.ContainerState_CONTAINER_CREATED,
	node.Starting: runtimeapi.ContainerState_CONTAINER_CREATED,
	node.Running:  runtimeapi.ContainerState_CONTAINER_RUNNING,
	node.Stopped:  runtimeapi.ContainerState_CONTAINER_EXITED,
	node.Killed:   runtimeapi.ContainerState_CONTAINER_EXITED,
}

func containerState(c *node.Container) runtimeapi.ContainerState {
	if s, ok := containerStates[c.State]; ok {
		return s
	}
	return runtimeapi.ContainerState_CONTAINER_UNKNOWN
}

// requestedImage returns the image under the name that the user wrote. In requests, the kubelet names the image by the
// ID that the pull returned. The kubelet puts the user's name for the image into user_specified_image, and shows that
// name in the pod's status.
func requestedImage(spec *runtimeapi.ImageSpec) *runtimeapi.ImageSpec {
	name := spec.GetUserSpecifiedImage()
	if name == "" || name == spec.GetImage() {
		return spec
	}
	return &runtimeapi.ImageSpec{
		Image: name, UserSpecifiedImage: name, Annotations: spec.GetAnnotations(), RuntimeHandler: spec.GetRuntimeHandler(),
		ImageRef: spec.GetImageRef(),
	}
}

// logPath returns the path of the container's log on the host, or "" if the container has no log.
func logPath(pod *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) string {
	if pod.GetLogDirectory() == "" || c.GetLogPath() == "" {
		return ""
	}
	return filepath.Join(pod.GetLogDirectory(), c.GetLogPath())
}

// nano converts a time to the CRI's form: nanoseconds since 1970, 0 for the zero time.
func nano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
