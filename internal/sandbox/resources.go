package sandbox

import (
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Resources returns the resources of a container that is limited as a whole pod, unless it is
// foreign. A foreign container gets only its own. Where the container has no limit on memory or CPU time, the
// pod's limit applies, because nothing else runs in the pod. A kubelet sends limits of whole pods (KEP-2837) as the
// pod's resources, and otherwise the sum of the containers' limits.
func Resources(p *Pod, c *Container) *runtimeapi.LinuxContainerResources {
	own, pods := c.Config.GetLinux().GetResources(), p.Config.GetLinux().GetResources()
	if IsForeign(p, c) {
		return own
	}
	takesMemory := own.GetMemoryLimitInBytes() == 0 && pods.GetMemoryLimitInBytes() > 0
	takesCPU := own.GetCpuQuota() == 0 && pods.GetCpuQuota() > 0
	if !takesMemory && !takesCPU {
		return own
	}
	merged := &runtimeapi.LinuxContainerResources{}
	proto.Merge(merged, own)
	if takesMemory {
		merged.MemoryLimitInBytes = pods.GetMemoryLimitInBytes()
	}
	if takesCPU {
		merged.CpuQuota, merged.CpuPeriod = pods.GetCpuQuota(), pods.GetCpuPeriod()
	}
	return merged
}

// IsForeign reports whether a container of a backend with unit pods belongs to a pod of another backend
// (Capabilities.ForeignPods). The container c can be nil.
func IsForeign(p *Pod, c *Container) bool { return c != nil && c.ID != p.ID }
