package wasm

import (
	"context"
	"os/exec"
	"path"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stats"
)

// workerOverhead is the memory, in bytes, that a pod's own worker needs besides the guest's memory.
const workerOverhead = 64 << 20

// place is the cgroup that a worker starts in. If dir is empty, the worker starts in the daemon's cgroup. With the
// systemd driver, dir is always empty, because only systemd creates cgroups. Workers in the cgroup of the daemon's
// service are not killed when the service stops.
type place struct {
	tree   cgroup.Tree
	dir    string
	limits []cgroup.Write
}

// cgroupName returns the name of a cgroup of this backend. Without the prefix, other backends could take it for the
// cgroup of an unknown pod and remove it.
func cgroupName(name string) string { return cgroup.Mark + "wasm-" + name }

// forWorker returns the place of a worker's own cgroup below p. The cgroup is named after the worker, not the pod,
// because the cgroup of the pod's previous worker can still exist when the next worker starts.
func (p place) forWorker(worker string) place {
	if p.dir != "" {
		p.dir = path.Join(p.dir, cgroupName(worker))
	}
	return p
}

// shared returns the place of shared workers, which enforce the limits of their pods themselves.
func (k *keeper) shared() place {
	if k.cgroups.Driver != cgroup.DriverCgroupfs {
		return place{}
	}
	return place{tree: k.cgroups, dir: k.cgroups.Parent}
}

// own returns the place of a pod's own worker. It is a cgroup below the parent that the kubelet names, with those of
// the container's limits that the kernel can enforce on a process.
func (k *keeper) own(p *sandbox.Pod, c *sandbox.Container) place {
	if k.cgroups.Driver != cgroup.DriverCgroupfs {
		return place{}
	}
	parent := p.Config.GetLinux().GetCgroupParent()
	if parent == "" {
		parent = k.cgroups.Parent
	}
	return place{tree: k.cgroups, dir: parent, limits: limitsOf(k.cgroups, sandbox.Resources(p, c))}
}

// limitsOf returns the cgroup files to write for a container's resources.
func limitsOf(tree cgroup.Tree, res *runtimeapi.LinuxContainerResources) []cgroup.Write {
	return append(tree.Limits(res, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: workerOverhead}), cgroup.CPUSet(res)...)
}

// start creates the cgroup, sets its limits and starts cmd in it.
func (p place) start(cmd *exec.Cmd) error {
	if p.dir == "" {
		return cmd.Start()
	}
	if err := p.tree.Create(p.dir); err != nil {
		return err
	}
	if err := p.tree.Apply(p.dir, p.limits); err != nil {
		return err
	}
	return p.tree.Start(cmd, p.dir, nil)
}

// removeCgroup removes the cgroup of a worker that has ended, if the worker had one.
func (k *keeper) removeCgroup(dir string) error {
	if dir == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	return k.cgroups.Remove(ctx, dir)
}

// updateOwn changes the limits of a running container's own worker.
func (b *Backend) updateOwn(w *worker, p *sandbox.Pod, c *sandbox.Container) error {
	if !isOwn(w.scope) || w.cgroup == "" {
		return nil
	}
	res := sandbox.Resources(p, c)
	if limit := res.GetMemoryLimitInBytes(); limit > 0 {
		if err := stats.CheckShrink(w.cgroup, limit+workerOverhead); err != nil {
			return err
		}
	}
	return b.keeper.cgroups.Apply(w.cgroup, limitsOf(b.keeper.cgroups, res))
}

// ownFigures returns the statistics of a pod's own worker, or nil if the worker is shared or has no cgroup.
func (b *Backend) ownFigures(w *worker) *stats.Figures {
	if !isOwn(w.scope) || w.cgroup == "" {
		return nil
	}
	f, err := stats.Read(w.cgroup)
	if err != nil {
		return nil
	}
	return &f
}
