package play

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// How Kubernetes converts CPUs to the values of cgroups.
const (
	cpuPeriod    = 100_000 // µs
	leastQuota   = 1000    // µs
	sharesPerCPU = 1024
	leastShares  = 2
	mostShares   = 262_144
)

// resources converts limits and requests. A request that is missing is the limit.
func (t *translator) resources(at *field.Path, r corev1.ResourceRequirements) *runtimeapi.LinuxContainerResources {
	t.checkResources(at.Child("limits"), r.Limits)
	t.checkResources(at.Child("requests"), r.Requests)
	for name, request := range r.Requests {
		if limit, ok := r.Limits[name]; ok && request.Cmp(limit) > 0 {
			t.invalid(at.Child("requests").Key(string(name)), request.String(), "is more than the limit %s", limit.String())
		}
	}
	cpu, ok := r.Requests[corev1.ResourceCPU]
	if !ok {
		cpu = r.Limits[corev1.ResourceCPU]
	}
	return &runtimeapi.LinuxContainerResources{
		CpuShares:          min(max(cpu.MilliValue()*sharesPerCPU/1000, leastShares), mostShares),
		CpuPeriod:          cpuPeriod,
		CpuQuota:           quota(r.Limits),
		MemoryLimitInBytes: r.Limits.Memory().Value(),
	}
}

// containerResources converts the resources of a container. A limit that it lacks is that of the pod.
func (t *translator) containerResources(at *field.Path, c *corev1.Container) *runtimeapi.LinuxContainerResources {
	r := *c.Resources.DeepCopy()
	if pod := t.pod.Spec.Resources; pod != nil {
		limits := corev1.ResourceList{}
		maps.Copy(limits, pod.Limits)
		maps.Copy(limits, r.Limits)
		r.Limits = limits
	}
	return t.resources(at.Child("resources"), r)
}

// quota returns 0 for no limit.
func quota(limits corev1.ResourceList) int64 {
	if limits.Cpu().IsZero() {
		return 0
	}
	return max(limits.Cpu().MilliValue()*cpuPeriod/1000, leastQuota)
}

// podResources returns nil for a pod without resources of its own.
func (t *translator) podResources() *runtimeapi.LinuxContainerResources {
	if t.pod.Spec.Resources == nil {
		return nil
	}
	return t.resources(field.NewPath("spec", "resources"), *t.pod.Spec.Resources)
}

func (t *translator) overhead() *runtimeapi.LinuxContainerResources {
	if len(t.pod.Spec.Overhead) == 0 {
		return nil
	}
	at := field.NewPath("spec", "overhead")
	t.checkResources(at, t.pod.Spec.Overhead)
	return &runtimeapi.LinuxContainerResources{
		CpuShares: t.pod.Spec.Overhead.Cpu().MilliValue() * sharesPerCPU / 1000, CpuPeriod: cpuPeriod,
		CpuQuota: quota(t.pod.Spec.Overhead), MemoryLimitInBytes: t.pod.Spec.Overhead.Memory().Value(),
	}
}

func (t *translator) checkResources(at *field.Path, list corev1.ResourceList) {
	for name, quantity := range list {
		oneOf(t, at, name, corev1.ResourceCPU, corev1.ResourceMemory)
		if quantity.Sign() < 0 {
			t.invalid(at.Key(string(name)), quantity.String(), "must not be negative")
		}
	}
}
