package resources

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/utils/cpuset"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/stats"
)

const (
	// GuestOverhead is the memory in bytes that the kernel and the programs of a guest for containers need in addition to the
	// containers'.
	GuestOverhead = 192 << 20
	// GuestBoot is the memory in bytes with which machines boot, unless they have less. They grow to their size at once. So
	// machines of all sizes continue from the same templates.
	GuestBoot = GuestOverhead + 64<<20
	// maxGrowth is the most memory in bytes to which a machine can grow, because QEMU needs 0.1 MiB for each GiB of that.
	// Machines with more than half of it can grow to hugeGrowth: some models of processors have addresses of 40 bits.
	maxGrowth  = 64 << 30
	hugeGrowth = 512 << 30
	// maxGrowthCPUs is the most CPUs that a machine can get while it runs. A guest's kernel needs 0.3 MB for each one that can
	// come.
	maxGrowthCPUs = 32
	// QuotaPeriod is the period in µs of quotas of several containers together.
	QuotaPeriod = 100_000
)

// Growth returns how far a machine with this memory in bytes and these CPUs can grow on this node, or nil if it cannot.
func Growth(memory uint64, cpus int) *machine.Growth {
	most := min(nodeMemory(), maxGrowth)
	if memory > maxGrowth/2 {
		most = min(nodeMemory(), hugeGrowth)
	}
	if most <= memory {
		return nil
	}
	return &machine.Growth{Boot: min(memory, GuestBoot), Memory: most, CPUs: max(cpus, min(NodeCPUs(), maxGrowthCPUs))}
}

// nodeMemory returns the node's memory in bytes. It is rounded down, so that another kernel of the node finds the same value.
func nodeMemory() uint64 { return stats.NodeMemory() &^ (256<<20 - 1) }

// NodeCPUs returns the number of the node's CPUs, of which the daemon itself may have fewer.
func NodeCPUs() int {
	raw, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err == nil {
		if online, err := cpuset.Parse(strings.TrimSpace(string(raw))); err == nil && !online.IsEmpty() {
			return online.Size()
		}
	}
	return runtime.NumCPU()
}

// QuotaOf returns a quota in µs per QuotaPeriod, 0 if it is not set, or -1 if there shall be none.
func QuotaOf(res *runtimeapi.LinuxContainerResources) int64 {
	quota, period := res.GetCpuQuota(), res.GetCpuPeriod()
	switch {
	case quota <= 0:
		return max(quota, -1)
	case period <= 0:
		return quota
	}
	return (quota*QuotaPeriod + period - 1) / period
}

// CPUsOf returns how many CPUs a quota in µs per QuotaPeriod can keep busy.
func CPUsOf(quota int64) int { return int((quota + QuotaPeriod - 1) / QuotaPeriod) }

// WholeMiB returns a size in bytes, rounded down to whole MiB.
func WholeMiB(n uint64) uint64 { return n &^ (1<<20 - 1) }

// Quantity formats n bytes as a Kubernetes quantity, in whole MiB if possible.
func Quantity(n uint64) string {
	if n%(1<<20) == 0 {
		return fmt.Sprintf("%dMi", n>>20)
	}
	return fmt.Sprint(n)
}
