package vm

import (
	"fmt"
	"path"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/internal/stats"
)

// shortage returns a warning if the memory limit of the pod's parent cgroup is too low for a guest with the given
// memory, otherwise "". A kubelet sets that limit to the sum of the containers' limits and the RuntimeClass's overhead.
// The overhead must be large enough for the memory that QEMU needs in addition to the guest's.
//
// This is only a warning, because a guest takes its memory page by page, and may never use all of it.
func (b *Backend) shortage(p *sandbox.Pod, memory uint64) string {
	linux := p.Config.GetLinux()
	if linux.GetCgroupParent() == "" {
		return ""
	}
	pod := path.Dir(b.cgroupOf(p))
	limit, err := b.cgroups.MemoryLimit(pod)
	if need := memory + b.cfg.VM.MemoryOverhead; err != nil || limit == 0 || limit >= need {
		return ""
	}
	return fmt.Sprintf("the pod's cgroup %s is limited to %s, the machine needs %s (guest %s, overhead %s), and the pod's RuntimeClass declares an overhead of %s: "+
		"give it overhead.podFixed.memory: %s", pod, resources.Quantity(limit), resources.Quantity(memory+b.cfg.VM.MemoryOverhead),
		resources.Quantity(memory), resources.Quantity(b.cfg.VM.MemoryOverhead),
		resources.Quantity(uint64(linux.GetOverhead().GetMemoryLimitInBytes())), resources.Quantity(b.cfg.VM.MemoryOverhead))
}

// outOfMemory explains why the kernel killed the hypervisor for lack of memory, and what to change.
func (b *Backend) outOfMemory(p *sandbox.Pod, memory uint64) string {
	if why := b.shortage(p, memory); why != "" {
		return why
	}
	return fmt.Sprintf("QEMU needed more than %s on top of the guest's %s: raise vm.memory_overhead, and the overhead.podFixed.memory of the pod's RuntimeClass with it",
		resources.Quantity(b.cfg.VM.MemoryOverhead), resources.Quantity(memory))
}

// failedEnd returns how a failed start ended, and the error for the caller. A driver cannot tell why a hypervisor died
// during a start, but the cgroup's count of OOM kills shows whether memory was the reason.
func (b *Backend) failedEnd(id string, l *life, cause error, def machine.Definition) (machine.State, error) {
	killed := oomKills(def.Cgroup) > l.oomKills
	if killed {
		cause = fmt.Errorf("QEMU was killed for lack of memory: %s (%w): %w", b.outOfMemory(l.pod, def.Memory), cause,
			errdefs.ErrFailedPrecondition)
	}
	cause = fmt.Errorf("start container %s: %w", id, cause)
	end := startError(cause)
	if killed {
		end.Cause, end.ExitCode = machine.CauseOOM, sandbox.ExitKilled
	}
	return end, cause
}

// oomKills returns how many processes in a cgroup the kernel has killed because of the memory limit of the cgroup
// itself or of a parent. It returns 0 if the number is unknown.
func oomKills(dir string) uint64 {
	kills, err := stats.OOMKills(dir)
	if err != nil {
		return 0
	}
	return kills
}
