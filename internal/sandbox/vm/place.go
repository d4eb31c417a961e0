package vm

import (
	"cmp"
	"context"
	"errors"
	"path"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// slicePrefix precedes the pod's ID in the names of the disk machines' cgroups and, with the systemd driver, of the slices of
// pods without a parent.
const slicePrefix = "vm-"

// cgroupOf returns the cgroup path of a pod's hypervisor process, below the requested parent or the node's default. No
// other backend may use names of this form, because each backend removes unknown cgroups whose names have the backend's
// form.
//
//	cgroupfs   <parent>/tripod-vm-<id>
//	systemd    <the pod's slice>/tripod-vm-<id>.service
func (b *Backend) cgroupOf(p *sandbox.Pod) string {
	parent := p.Config.GetLinux().GetCgroupParent()
	if b.cgroups.Driver == cgroup.DriverSystemd {
		parent, _ = b.cgroups.Pod(parent, b.cfg.Prefix+p.ID)
	}
	return b.cgroups.Leaf(cmp.Or(parent, b.cgroups.Parent), cgroup.Mark+b.cfg.Prefix+p.ID)
}

// limit applies a container's limits to a cgroup. The memory limit is the guest's memory plus the hypervisor's
// overhead.
//
// With cgroup v1, no cgroup has more CPU time than its parent. A kubelet reports a pod's new limit before it raises that of
// the pod's cgroup. The machine's cgroup then gets no limit of its own, and the parent's limit applies, now and later.
func (b *Backend) limit(dir string, memory uint64, res *runtimeapi.LinuxContainerResources) error {
	own := &runtimeapi.LinuxContainerResources{
		MemoryLimitInBytes: int64(memory), CpuQuota: res.GetCpuQuota(), CpuPeriod: res.GetCpuPeriod(), CpuShares: res.GetCpuShares(),
	}
	apply := func() error {
		writes := b.cgroups.Limits(own, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: int64(b.cfg.VM.MemoryOverhead)})
		return b.cgroups.Apply(dir, append(writes, cgroup.CPUSet(res)...))
	}
	err := apply()
	if own.CpuQuota > 0 && errors.Is(err, unix.EINVAL) {
		own.CpuQuota = -1
		err = apply()
	}
	return err
}

// removeCgroup kills the processes in a machine's cgroup and removes the cgroup and, if it is ours, the pod's slice.
func (b *Backend) removeCgroup(ctx context.Context, id, dir string) error {
	if dir == "" {
		return nil
	}
	if err := b.cgroups.Kill(ctx, dir); err != nil {
		return err
	}
	if err := b.cgroups.Remove(ctx, dir); err != nil {
		return err
	}
	return b.cgroups.RemoveSlice(ctx, b.cfg.Prefix+id, path.Dir(dir))
}
