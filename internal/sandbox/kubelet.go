package sandbox

import (
	"cmp"
	"path"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// annotationTerminationMessagePath is where the kubelet says at which path in the container it mounts the file of the
// termination message.
const annotationTerminationMessagePath = "io.kubernetes.container.terminationMessagePath"

// TerminationMessagePath is the path in the container at which the kubelet mounts a file of its own for the container's last
// words.
func TerminationMessagePath(config *runtimeapi.ContainerConfig) string {
	return path.Clean(cmp.Or(config.GetAnnotations()[annotationTerminationMessagePath], "/dev/termination-log"))
}

// kubeletUnified are the files of cgroup v2 that a kubelet 1.37 writes into linux.resources.unified without being asked by the
// pod's author: memory.min, memory.low and memory.swap.max always, memory.oom.group and memory.high by its configuration.
var kubeletUnified = []string{"memory.high", "memory.low", "memory.min", "memory.oom.group", "memory.swap.max"}

// DemandedUnified lists the files in linux.resources.unified that no kubelet writes by itself, in order: somebody counts on
// them.
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

// DemandsLabel reports whether SELinux options ask for more than every process has where no label is applied: the level s0
// without categories. Kubernetes' conformance specs name that level for pods on any node.
func DemandsLabel(o *runtimeapi.SELinuxOption) bool {
	return o.GetUser() != "" || o.GetRole() != "" || o.GetType() != "" || o.GetLevel() != "" && o.GetLevel() != "s0"
}
