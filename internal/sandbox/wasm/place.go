package wasm

import (
	"context"
	"os"
	"os/exec"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stats"
)

// workerOverhead is what a worker needs for itself, in bytes, beyond the memory limit of its pod's guest.
const workerOverhead = 64 << 20

// place is the cgroup that a worker starts in; without a directory, the daemon's own. With the systemd driver only
// systemd makes cgroups: workers then stay in the daemon's service, which does not kill them when it stops.
type place struct {
	tree   cgroup.Tree
	dir    string
	limits []cgroup.Write
}

// cgroupName marks a cgroup as ours. A name that is a pod's ID alone would be another backend's, which removes those
// that it does not know.
func cgroupName(name string) string { return cgroup.Mark + "wasm-" + name }

// of is the worker's own cgroup below this one. It is named after the worker, not after the pod: the cgroup of the
// pod's previous worker may be removed while the next one starts.
func (p place) of(worker string) place {
	if p.dir != "" {
		p.dir = path.Join(p.dir, cgroupName(worker))
	}
	return p
}

// shared is the place of workers with many pods. The worker itself enforces the limits of its pods.
func (k *keeper) shared() place {
	if k.cgroups.Driver != cgroup.DriverCgroupfs {
		return place{}
	}
	return place{tree: k.cgroups, dir: k.cgroups.Parent}
}

// own is the place of a pod's own worker: below the parent that the kubelet names, with the container's limits as far
// as the kernel can enforce them on a process.
func (k *keeper) own(p *sandbox.Pod, c *sandbox.Container) place {
	if k.cgroups.Driver != cgroup.DriverCgroupfs {
		return place{}
	}
	parent := p.Config.GetLinux().GetCgroupParent()
	if parent == "" {
		parent = k.cgroups.Parent
	}
	return place{tree: k.cgroups, dir: parent, limits: limitsOf(k.cgroups, c.Config.GetLinux().GetResources())}
}

// limitsOf are the files to write for a container's resources.
func limitsOf(tree cgroup.Tree, res *runtimeapi.LinuxContainerResources) []cgroup.Write {
	return append(tree.Limits(res, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: workerOverhead}), cgroup.CPUSet(res)...)
}

// start starts a command in the place.
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
	if p.tree.V2 {
		at, err := os.OpenFile(filepath.Join(p.tree.Roots[""], p.dir), unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer at.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(at.Fd())
		return cmd.Start()
	}
	done := make(chan error, 1)
	go process.OnOwnThread(func() {
		err := p.tree.Enter(p.dir)
		if err == nil {
			err = cmd.Start()
		}
		done <- err
	})
	return <-done
}

// leaveCgroup removes the cgroup of a worker that has ended.
func (k *keeper) leaveCgroup(dir string) error {
	if dir == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	return k.cgroups.Remove(ctx, dir)
}

// updateOwn changes the limits of a running container's own worker.
func (b *Backend) updateOwn(w *worker, c *sandbox.Container) error {
	if !isOwn(w.scope) || w.cgroup == "" {
		return nil
	}
	return b.keeper.cgroups.Apply(w.cgroup, limitsOf(b.keeper.cgroups, c.Config.GetLinux().GetResources()))
}

// ownFigures is what a pod's own worker uses; nil when it has none, or no cgroup.
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
