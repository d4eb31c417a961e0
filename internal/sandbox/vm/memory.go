package vm

import (
	"fmt"
	"path"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/stats"
)

// shortage explains that the pod's parent cgroup is limited to less than a machine with that much memory may take; "" if it is
// not. A kubelet sets that limit to the requests of the containers plus the overhead of the RuntimeClass, and QEMU needs more
// than the guest.
//
// It is a warning only: a guest takes its memory page by page, and may never use all of it.
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
		"give it overhead.podFixed.memory: %s", pod, quantity(limit), quantity(memory+b.cfg.VM.MemoryOverhead), quantity(memory), quantity(b.cfg.VM.MemoryOverhead),
		quantity(uint64(linux.GetOverhead().GetMemoryLimitInBytes())), quantity(b.cfg.VM.MemoryOverhead))
}

// outOfMemory explains why the kernel killed a hypervisor for lack of memory, and what to change.
func (b *Backend) outOfMemory(p *sandbox.Pod, memory uint64) string {
	if why := b.shortage(p, memory); why != "" {
		return why
	}
	return fmt.Sprintf("QEMU needed more than %s on top of the guest's %s: raise vm.memory_overhead, and the overhead.podFixed.memory of the pod's RuntimeClass with it",
		quantity(b.cfg.VM.MemoryOverhead), quantity(memory))
}

// failedEnd returns the end of a failed start, and the caller's error. A driver cannot tell why a hypervisor died as it
// started; the cgroup's count of kills shows whether memory was the reason.
func (b *Backend) failedEnd(id string, l *life, cause error, def machine.Definition) (machine.State, error) {
	killed := oomKills(def.Cgroup) > l.oomKills
	if killed {
		cause = fmt.Errorf("QEMU was killed for want of memory: %s (%v): %w", b.outOfMemory(l.pod, def.Memory), cause, errdefs.ErrFailedPrecondition)
	}
	cause = fmt.Errorf("start container %s: %w", id, cause)
	end := startError(cause)
	if killed {
		end.Cause, end.ExitCode = machine.CauseOOM, sandbox.ExitKilled
	}
	return end, cause
}

// oomKills returns how many processes of a cgroup the kernel has killed for lack of memory, by its own limit or by that of a
// cgroup above; 0 if unknown.
func oomKills(dir string) uint64 {
	kills, err := stats.OOMKills(dir)
	if err != nil {
		return 0
	}
	return kills
}

// quantity formats bytes as Kubernetes does, in whole MiB if possible.
func quantity(n uint64) string {
	if n%(1<<20) == 0 {
		return fmt.Sprintf("%dMi", n>>20)
	}
	return fmt.Sprint(n)
}
