package workers

import (
	"cmp"
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

// WorkerReserve is the part of a foreign container's memory limit, in bytes, that is kept for its worker, and
// ForeignMinimum is the smallest such limit. The worker gets nothing beyond the limit, because the limit of the pod is the
// sum of its containers' limits. An idle worker uses 8 MiB (TestComponentsInLinuxPods).
const (
	WorkerReserve  = 16 << 20
	ForeignMinimum = WorkerReserve + 8<<20
)

// place is the parent of the cgroup that a worker starts in, and after forWorker the cgroup itself.
type place struct {
	tree   cgroup.Tree
	dir    string
	limits []cgroup.Write
	// Own means that the parent is not ours, so that the cgroup must be a unit with the systemd driver.
	own bool
	// oomScore is the oom_score_adj of the worker; nil means the daemon's.
	oomScore *int64
}

// SlicePrefix precedes the pod's ID in the names of the slices that pods without a parent get with the systemd driver.
const SlicePrefix = "wasm-"

// cgroupName returns the name of a cgroup of this backend. Without the prefix, other backends could take it for the
// Cgroup of an unknown pod and remove it.
func cgroupName(name string) string { return cgroup.Mark + SlicePrefix + name }

// forWorker returns the place of a worker's own cgroup below p. The cgroup is named after the worker, not the pod,
// because the cgroup of the pod's previous worker can still exist when the next worker starts.
func (p place) forWorker(worker string) place {
	if name := cgroupName(worker); p.own {
		p.dir = p.tree.Leaf(p.dir, name)
	} else {
		p.dir = path.Join(p.dir, name)
	}
	return p
}

// shared returns the place of shared workers, which enforce the limits of their pods themselves.
func (k *Keeper) shared(ctx context.Context) (place, error) {
	helpers, err := k.cfg.Cgroups.Helpers(ctx)
	return place{tree: k.cfg.Cgroups, dir: helpers}, err
}

// Own returns the place of a pod's own worker. It is a cgroup below the parent that the kubelet names, or below
// the pod's cgroup if the container is foreign, with those of the container's limits that the kernel can enforce on a process.
// With the systemd driver it is a service in the pod's slice.
func (k *Keeper) Own(p *sandbox.Pod, c *sandbox.Container) place {
	parent := p.Config.GetLinux().GetCgroupParent()
	in := place{tree: k.cfg.Cgroups, limits: limitsOf(k.cfg.Cgroups, p, c), own: true}
	switch {
	case sandbox.IsForeign(p, c):
		in.dir, _ = k.cfg.Cgroups.Pod(parent, p.ID)
	case k.cfg.Cgroups.Driver == cgroup.DriverSystemd:
		in.dir, _ = k.cfg.Cgroups.Pod(parent, SlicePrefix+p.ID)
	default:
		in.dir = cmp.Or(parent, k.cfg.Cgroups.Parent)
	}
	if sandbox.IsForeign(p, c) {
		in.oomScore = new(c.Config.GetLinux().GetResources().GetOomScoreAdj())
	}
	return in
}

// limitsOf returns the cgroup files to write for a container's resources.
func limitsOf(tree cgroup.Tree, p *sandbox.Pod, c *sandbox.Container) []cgroup.Write {
	res := sandbox.Resources(p, c)
	return append(tree.Limits(res, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: overheadOf(p, c)}), cgroup.CPUSet(res)...)
}

// overheadOf returns how far the memory limit of a pod's own worker exceeds the container's, in bytes.
func overheadOf(p *sandbox.Pod, c *sandbox.Container) int64 {
	if sandbox.IsForeign(p, c) {
		return 0
	}
	return workerOverhead
}

// MemoryLimit returns the limit on a container's linear memory in bytes; 0 or less means no limit.
func MemoryLimit(p *sandbox.Pod, c *sandbox.Container) int64 {
	limit := sandbox.Resources(p, c).GetMemoryLimitInBytes()
	if limit > 0 && sandbox.IsForeign(p, c) {
		return limit - WorkerReserve
	}
	return limit
}

// start creates the cgroup, sets its limits and starts cmd in it.
func (p place) start(cmd *exec.Cmd) error {
	if err := p.tree.Create(p.dir); err != nil {
		return err
	}
	if err := p.tree.Apply(p.dir, p.limits); err != nil {
		return err
	}
	return p.tree.Start(cmd, p.dir, nil)
}

// removeCgroup removes the cgroup of a worker that has ended, if the worker had one.
func (k *Keeper) removeCgroup(dir string) error {
	if dir == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	return k.cfg.Cgroups.Remove(ctx, dir)
}

// Limit changes the limits of a running container's own worker. It does nothing if the worker is shared.
func (k *Keeper) Limit(w *Worker, p *sandbox.Pod, c *sandbox.Container) error {
	if !IsOwn(w.Scope) || w.Cgroup == "" {
		return nil
	}
	if limit := sandbox.Resources(p, c).GetMemoryLimitInBytes(); limit > 0 {
		if err := stats.CheckShrink(w.Cgroup, limit+overheadOf(p, c)); err != nil {
			return err
		}
	}
	return k.cfg.Cgroups.Apply(w.Cgroup, limitsOf(k.cfg.Cgroups, p, c))
}

// Figures returns the statistics of a pod's own worker, or nil if the worker is shared or has no cgroup.
func (w *Worker) Figures() *stats.Figures {
	if !IsOwn(w.Scope) || w.Cgroup == "" {
		return nil
	}
	f, err := stats.Read(w.Cgroup)
	if err != nil {
		return nil
	}
	return &f
}
