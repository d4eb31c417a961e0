package vm

import (
	"cmp"
	"context"
	"path"

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
