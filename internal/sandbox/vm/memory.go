package vm

import (
	"fmt"
	"path"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/stats"
)

// shortage says that the cgroup which the pod's request names as the parent is limited to less than a machine with so much
// memory may take; empty when it is not. A kubelet limits that cgroup to what the pod's containers and the overhead of its
// RuntimeClass ask for, and QEMU needs more than the guest.
//
// It is said, and no reason to refuse the start: a guest takes its memory page by page, so that one that never uses all of it
// runs well in less.
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

// outOfMemory says what stood in the way of a machine whose hypervisor was killed for want of memory, and what to do.
func (b *Backend) outOfMemory(p *sandbox.Pod, memory uint64) string {
	if why := b.shortage(p, memory); why != "" {
		return why
	}
	return fmt.Sprintf("QEMU needed more than %s on top of the guest's %s: raise vm.memory_overhead, and the overhead.podFixed.memory of the pod's RuntimeClass with it",
		quantity(b.cfg.VM.MemoryOverhead), quantity(memory))
}

// failedEnd is the end of a start that failed, and what its caller is told. To a driver a hypervisor that is killed as it starts is
// no more than a start that failed; the kernel has counted the kill in its cgroup if it was for want of memory.
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

// oomKills is how often the kernel has killed something in a cgroup for want of memory, whether by its own limit or by that of
// a cgroup above; 0 when nobody knows.
func oomKills(dir string) uint64 {
	kills, err := stats.OOMKills(dir)
	if err != nil {
		return 0
	}
	return kills
}

// quantity writes bytes as Kubernetes does, in MiB where they are whole ones.
func quantity(n uint64) string {
	if n%(1<<20) == 0 {
		return fmt.Sprintf("%dMi", n>>20)
	}
	return fmt.Sprint(n)
}
