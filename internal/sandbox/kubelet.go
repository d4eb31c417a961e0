package sandbox

import (
	"cmp"
	"path"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TerminationMessagePath returns where in the container the kubelet mounts the termination message file.
func TerminationMessagePath(config *runtimeapi.ContainerConfig) string {
	return path.Clean(cmp.Or(config.GetAnnotations()["io.kubernetes.container.terminationMessagePath"], "/dev/termination-log"))
}

// FromKubelet reports whether a kubelet made the request, judging by the label that a kubelet sets on every container.
func FromKubelet(config *runtimeapi.ContainerConfig) bool {
	return config.GetLabels()["io.kubernetes.container.name"] != ""
}

// kubeletUnified lists the cgroup v2 files that kubelet 1.37 sets in linux.resources.unified on its own. It always sets
// memory.min, memory.low and memory.swap.max. It sets memory.oom.group and memory.high depending on its configuration.
var kubeletUnified = []string{"memory.high", "memory.low", "memory.min", "memory.oom.group", "memory.swap.max"}

// DemandedUnified returns a sorted list of the files in linux.resources.unified that the pod's author must have asked
// for, because a kubelet does not set them on its own.
func DemandedUnified(res *runtimeapi.LinuxContainerResources) []string {
	var demanded []string
	for key := range res.GetUnified() {
		if !slices.Contains(kubeletUnified, key) {
			demanded = append(demanded, key)
		}
	}
	slices.Sort(demanded)
	return demanded
}

// DemandsLabel reports whether SELinux options ask for more than the plain level s0, which has no categories. Options
// that ask only for s0 need no label, because every process has that level anyway. Kubernetes' conformance tests ask
// for s0 on every node.
func DemandsLabel(o *runtimeapi.SELinuxOption) bool {
	return o.GetUser() != "" || o.GetRole() != "" || o.GetType() != "" || o.GetLevel() != "" && o.GetLevel() != "s0"
}
