package cri

import (
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// The messages made here share labels, annotations and configurations with the node's snapshots, which never change:
// nothing of them is copied.

// sandboxStatus describes a pod in full.
func sandboxStatus(p *node.Pod) *runtimeapi.PodSandboxStatus {
	return &runtimeapi.PodSandboxStatus{
		Id: p.ID, Metadata: p.Config.GetMetadata(), State: sandboxState(p), CreatedAt: nano(p.CreatedAt),
		Network: networkStatus(p),
		Linux: &runtimeapi.LinuxPodSandboxStatus{Namespaces: &runtimeapi.Namespace{
			Options: namespaceOptions(p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions()),
		}},
		Labels: p.Config.GetLabels(), Annotations: p.Config.GetAnnotations(), RuntimeHandler: p.RuntimeHandler(),
	}
}

// networkStatus holds the addresses of a ready pod. One that is stopped has given them back.
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

func namespaceOptions(o *runtimeapi.NamespaceOption) *runtimeapi.NamespaceOption {
	if o == nil {
		return &runtimeapi.NamespaceOption{}
	}
	return o
}

func sandboxState(p *node.Pod) runtimeapi.PodSandboxState {
	if p.Ready() {
		return runtimeapi.PodSandboxState_SANDBOX_READY
	}
	return runtimeapi.PodSandboxState_SANDBOX_NOTREADY
}

// sandboxItem describes a pod for a list.
func sandboxItem(p *node.Pod) proto.Message {
	return &runtimeapi.PodSandbox{
		Id: p.ID, Metadata: p.Config.GetMetadata(), State: sandboxState(p), CreatedAt: nano(p.CreatedAt),
		Labels: p.Config.GetLabels(), Annotations: p.Config.GetAnnotations(), RuntimeHandler: p.RuntimeHandler(),
	}
}

// containerItem describes a container for a list.
func containerItem(c *node.Container) proto.Message {
	return &runtimeapi.Container{
		Id: c.ID, PodSandboxId: c.PodID, Metadata: c.Config.GetMetadata(),
		Image: imageAsked(c.Config.GetImage()), ImageRef: c.ImageID, ImageId: c.ImageID,
		State: containerState(c), CreatedAt: nano(c.CreatedAt), Labels: c.Config.GetLabels(), Annotations: c.Config.GetAnnotations(),
	}
}

// containerStatuses describes every container of a pod in full.
func containerStatuses(p *node.Pod) []*runtimeapi.ContainerStatus {
	containers := p.Visible()
	statuses := make([]*runtimeapi.ContainerStatus, len(containers))
	for i, c := range containers {
		statuses[i] = containerStatus(p, c)
	}
	return statuses
}

// containerStatus describes a container in full. What a start or an end leaves behind is told only of a container
// that is in that state: one that was restarted has no exit code.
func containerStatus(p *node.Pod, c *node.Container) *runtimeapi.ContainerStatus {
	s := &runtimeapi.ContainerStatus{
		Id: c.ID, Metadata: c.Config.GetMetadata(), State: containerState(c), CreatedAt: nano(c.CreatedAt),
		Image: imageAsked(c.Config.GetImage()), ImageRef: c.ImageID, ImageId: c.ImageID,
		Labels: c.Config.GetLabels(), Annotations: c.Config.GetAnnotations(), Mounts: c.Resolved.Mounts,
		LogPath: logPath(p.Config, c.Config), User: c.Resolved.User, StopSignal: c.Resolved.StopSignal,
	}
	if r := c.Config.GetLinux().GetResources(); r != nil {
		s.Resources = &runtimeapi.ContainerResources{Linux: resourcesInForce(c, r)}
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

// resourcesInForce are those that were asked for, and the limit of swap that follows from them.
func resourcesInForce(c *node.Container, asked *runtimeapi.LinuxContainerResources) *runtimeapi.LinuxContainerResources {
	if !c.Resolved.SwapLimited || asked.GetMemoryLimitInBytes() == 0 || asked.GetMemorySwapLimitInBytes() != 0 {
		return asked
	}
	r := proto.CloneOf(asked)
	r.MemorySwapLimitInBytes = r.GetMemoryLimitInBytes()
	return r
}

// containerStates are the node's states as the CRI has them. A container is CREATED until it runs.
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

// imageAsked is the image as a person asked for it. The kubelet replaces the name of the pod's specification by the
// ID that the pull gave and keeps the name in user_specified_image; the name is what it shows in the pod's status.
func imageAsked(spec *runtimeapi.ImageSpec) *runtimeapi.ImageSpec {
	name := spec.GetUserSpecifiedImage()
	if name == "" || name == spec.GetImage() {
		return spec
	}
	return &runtimeapi.ImageSpec{
		Image: name, UserSpecifiedImage: name, Annotations: spec.GetAnnotations(), RuntimeHandler: spec.GetRuntimeHandler(),
		ImageRef: spec.GetImageRef(),
	}
}

// logPath is where the container's log lies on the host, "" when none was asked for.
func logPath(pod *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) string {
	if pod.GetLogDirectory() == "" || c.GetLogPath() == "" {
		return ""
	}
	return filepath.Join(pod.GetLogDirectory(), c.GetLogPath())
}

// nano is a time as the CRI has it: nanoseconds since 1970, 0 when there is none.
func nano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
