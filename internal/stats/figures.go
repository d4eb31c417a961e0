package stats

import (
	"math"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Unlimited is the value of a limit that is not set ("max" on cgroup v2).
const Unlimited uint64 = math.MaxUint64

// Figures holds the usage of a cgroup and its children, as of Time. Counters start when the cgroup is created.
type Figures struct {
	// Time is the time just before the files were read. It includes a reading of the monotonic clock.
	Time time.Time
	// CPU is the processor time used, in nanoseconds, summed over all cores.
	CPU    uint64
	Memory Memory
	// Processes counts tasks: processes and their threads.
	Processes uint64
	PSI       PSI
}

// Memory holds memory figures. All are in bytes, except the counts of page faults.
type Memory struct {
	// Usage is all charged memory: anonymous memory, page cache, kernel memory.
	Usage uint64
	// WorkingSet is Usage minus the inactive file cache, as in cAdvisor and the kubelet's eviction.
	WorkingSet uint64
	// RSS is anonymous memory.
	RSS uint64
	// PageFaults counts all page faults. MajorPageFaults counts only the page faults that needed I/O.
	PageFaults, MajorPageFaults uint64
	// Limit is the cgroup's own limit, or Unlimited.
	Limit uint64
	// Swap is nil if the kernel does not account swap per cgroup.
	Swap *Swap
}

// Swap holds swap figures in bytes. Limit is the cgroup's own limit, or Unlimited.
type Swap struct{ Usage, Limit uint64 }

// PSI is pressure stall information (kernel: Documentation/accounting/psi.rst). A field is nil if the kernel does not
// offer it: cgroup v1 has no PSI, unless the host also has a v2 hierarchy with the same cgroup.
type PSI struct{ CPU, Memory, IO *Pressure }

// Pressure says how long tasks waited for a resource: Some counts the time when at least one task of the cgroup waited,
// and Full counts the time when all its tasks waited.
type Pressure struct{ Some, Full Stall }

// Stall holds a total in nanoseconds, and moving averages in percent over 10, 60 and 300 seconds.
type Stall struct {
	Total                uint64
	Avg10, Avg60, Avg300 float64
}

// Available returns the limit minus the working set. It returns false if there is no limit.
func (m Memory) Available() (uint64, bool) { return available(m.Limit, m.WorkingSet) }

// Available returns the limit minus the usage. It returns false if there is no limit.
func (s Swap) Available() (uint64, bool) { return available(s.Limit, s.Usage) }

func available(limit, used uint64) (uint64, bool) {
	if limit == Unlimited {
		return 0, false
	}
	return limit - min(used, limit), true
}

// CPUUsage returns the CRI message without UsageNanoCores, which needs two samples (see Sampler.CPUUsage).
func (f Figures) CPUUsage() *runtimeapi.CpuUsage {
	return &runtimeapi.CpuUsage{
		Timestamp:            f.Time.UnixNano(),
		UsageCoreNanoSeconds: value(f.CPU),
		Psi:                  f.PSI.CPU.message(),
	}
}

// MemoryUsage returns the CRI message. AvailableBytes is nil if there is no limit.
func (f Figures) MemoryUsage() *runtimeapi.MemoryUsage {
	m := f.Memory
	return &runtimeapi.MemoryUsage{
		Timestamp:       f.Time.UnixNano(),
		WorkingSetBytes: value(m.WorkingSet),
		AvailableBytes:  optional(m.Available()),
		UsageBytes:      value(m.Usage),
		RssBytes:        value(m.RSS),
		PageFaults:      value(m.PageFaults),
		MajorPageFaults: value(m.MajorPageFaults),
		Psi:             f.PSI.Memory.message(),
	}
}

// SwapUsage returns the CRI message, or nil if swap is not accounted.
func (f Figures) SwapUsage() *runtimeapi.SwapUsage {
	s := f.Memory.Swap
	if s == nil {
		return nil
	}
	return &runtimeapi.SwapUsage{
		Timestamp:          f.Time.UnixNano(),
		SwapAvailableBytes: optional(s.Available()),
		SwapUsageBytes:     value(s.Usage),
	}
}

// ProcessUsage returns the CRI message. It counts tasks and not processes, because across child cgroups the kernel
// counts only tasks.
func (f Figures) ProcessUsage() *runtimeapi.ProcessUsage {
	return &runtimeapi.ProcessUsage{Timestamp: f.Time.UnixNano(), ProcessCount: value(f.Processes)}
}

// IOUsage returns the CRI message, which contains only the I/O pressure.
func (f Figures) IOUsage() *runtimeapi.IoUsage {
	return &runtimeapi.IoUsage{Timestamp: f.Time.UnixNano(), Psi: f.PSI.IO.message()}
}

func (p *Pressure) message() *runtimeapi.PsiStats {
	if p == nil {
		return nil
	}
	return &runtimeapi.PsiStats{Full: p.Full.message(), Some: p.Some.message()}
}

func (s Stall) message() *runtimeapi.PsiData {
	return &runtimeapi.PsiData{Total: s.Total, Avg10: s.Avg10, Avg60: s.Avg60, Avg300: s.Avg300}
}

func value(v uint64) *runtimeapi.UInt64Value { return &runtimeapi.UInt64Value{Value: v} }

func optional(v uint64, ok bool) *runtimeapi.UInt64Value {
	if !ok {
		return nil
	}
	return value(v)
}
