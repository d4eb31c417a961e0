package nri

import (
	"iter"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// resourcesMessage converts limits from the CRI. In the CRI, zero means that a limit is not set.
func resourcesMessage(r *runtimeapi.LinuxContainerResources) *api.LinuxResources {
	if r == nil {
		return nil
	}
	m := &api.LinuxResources{
		Cpu: &api.LinuxCPU{
			Shares: api.UInt64(nonzero(uint64(r.GetCpuShares()))), Quota: api.Int64(nonzero(r.GetCpuQuota())),
			Period: api.UInt64(nonzero(uint64(r.GetCpuPeriod()))),
			Cpus:   r.GetCpusetCpus(), Mems: r.GetCpusetMems(),
		},
		Memory:  &api.LinuxMemory{Limit: api.Int64(nonzero(r.GetMemoryLimitInBytes())), Swap: api.Int64(nonzero(r.GetMemorySwapLimitInBytes()))},
		Unified: r.GetUnified(),
	}
	for _, l := range r.GetHugepageLimits() {
		m.HugepageLimits = append(m.HugepageLimits, &api.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	return m
}

func nonzero[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// split divides limits into those that the CRI can express, and the others. A result is nil if it would be empty.
func split(r *api.LinuxResources) (*runtimeapi.LinuxContainerResources, *api.LinuxResources) {
	if r = r.Copy().Strip(); r == nil {
		return nil, nil
	}
	limits := &runtimeapi.LinuxContainerResources{Unified: r.GetUnified()}
	r.Unified = nil
	if cpu := r.GetCpu(); cpu != nil {
		limits.CpuShares, limits.CpuQuota, limits.CpuPeriod = int64(cpu.GetShares().GetValue()), cpu.GetQuota().GetValue(),
			int64(cpu.GetPeriod().GetValue())
		limits.CpusetCpus, limits.CpusetMems = cpu.GetCpus(), cpu.GetMems()
		cpu.Shares, cpu.Quota, cpu.Period, cpu.Cpus, cpu.Mems = nil, nil, nil, "", ""
	}
	if memory := r.GetMemory(); memory != nil {
		limits.MemoryLimitInBytes, limits.MemorySwapLimitInBytes = memory.GetLimit().GetValue(), memory.GetSwap().GetValue()
		memory.Limit, memory.Swap = nil, nil
	}
	for _, l := range r.GetHugepageLimits() {
		limits.HugepageLimits = append(limits.HugepageLimits, &runtimeapi.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	r.HugepageLimits = nil
	if proto.Size(limits) == 0 {
		limits = nil
	}
	return limits, r.Strip()
}

// setFields yields the names of the fields that are set in a message of adjustments, down to the fields of linux and of
// its resources.
func setFields(prefix string, m protoreflect.Message) iter.Seq[string] {
	return func(yield func(string) bool) {
		if !m.IsValid() {
			return
		}
		m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			name := string(f.Name())
			if prefix != "" {
				name = prefix + "." + name
			}
			if name != "linux" && name != "linux.resources" && name != "linux.resources.memory" && name != "linux.resources.cpu" {
				return yield(name)
			}
			for inner := range setFields(name, v.Message()) {
				if !yield(inner) {
					return false
				}
			}
			return true
		})
	}
}
