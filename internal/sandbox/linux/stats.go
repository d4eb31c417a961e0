package linux

import (
	"cmp"
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
	"github.com/tripod-run/tripod/internal/stats"
)

// ContainerStats implements sandbox.StatsProvider. For a stopped container it reports only the writable layer.
func (b *Backend) ContainerStats(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (*runtimeapi.ContainerStats, error) {
	result, _, err := b.measure(ctx, p, c, func(dir string, _ int) (stats.Figures, stats.Samples, error) {
		f, err := stats.Read(dir)
		return f, nil, err
	})
	return result, err
}

// ContainerSamples implements sandbox.StatsProvider.
func (b *Backend) ContainerSamples(ctx context.Context, p *sandbox.Pod,
	c *sandbox.Container) (*runtimeapi.ContainerStats, stats.Samples, error) {
	result, samples, err := b.measure(ctx, p, c, stats.ReadAll)
	if samples != nil {
		samples.Filesystem(b.cfg.Root, result.WritableLayer.GetUsedBytes())
	}
	return result, samples, err
}

// measure returns a container's statistics. The given function reads its cgroup.
func (b *Backend) measure(ctx context.Context, p *sandbox.Pod, c *sandbox.Container,
	read func(dir string, pid int) (stats.Figures, stats.Samples, error)) (*runtimeapi.ContainerStats, stats.Samples, error) {
	h, err := b.ledger.Get(p.ID, c.ID)
	if err != nil {
		return nil, nil, err
	}
	result := &runtimeapi.ContainerStats{WritableLayer: b.writableLayer(ctx, h)}
	s, l := h.Snapshot()
	if l == nil {
		return result, nil, nil
	}
	f, samples, err := read(s.Cgroup, s.Init.Pid)
	if errdefs.IsNotFound(err) {
		return result, nil, nil // the container has just ended
	}
	if err != nil {
		return nil, nil, fmt.Errorf("container %s: %w", c.ID, err)
	}
	result.Cpu, result.Memory, result.Swap, result.Io = b.sampler.CPUUsage(h.ID, f), f.MemoryUsage(), f.SwapUsage(), f.IOUsage()
	return result, samples, nil
}

func (b *Backend) PodStats(_ context.Context, p *sandbox.Pod) (*runtimeapi.LinuxPodSandboxStats, error) {
	dir, _ := b.cgroups.pod(p)
	f, err := stats.Read(dir)
	if errdefs.IsNotFound(err) {
		return &runtimeapi.LinuxPodSandboxStats{}, nil // no container has been started
	}
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", p.ID, err)
	}
	return &runtimeapi.LinuxPodSandboxStats{
		Cpu: b.sampler.CPUUsage(p.ID, f), Memory: f.MemoryUsage(), Io: f.IOUsage(), Process: f.ProcessUsage(),
	}, nil
}

// writableLayer returns the disk usage of the container's layer, or nil if it is unknown.
func (b *Backend) writableLayer(ctx context.Context, h *handle) *runtimeapi.FilesystemUsage {
	u, err := b.images.Usage(ctx, snapshotPrefix+h.ID)
	if err != nil || u.Timestamp.IsZero() {
		return nil
	}
	return &runtimeapi.FilesystemUsage{
		Timestamp:  u.Timestamp.UnixNano(),
		FsId:       &runtimeapi.FilesystemIdentifier{Mountpoint: cmp.Or(u.Mountpoint, b.cfg.Root)},
		UsedBytes:  &runtimeapi.UInt64Value{Value: u.Bytes},
		InodesUsed: &runtimeapi.UInt64Value{Value: u.Inodes},
	}
}

// Inspect implements sandbox.Inspector.
func (b *Backend) Inspect(_ context.Context, p *sandbox.Pod, c *sandbox.Container) (map[string]any, error) {
	if c == nil {
		return b.inspectPod(p), nil
	}
	h, err := b.ledger.Get(p.ID, c.ID)
	if err != nil {
		return nil, err
	}
	config, err := readConfig(b.bundleOf(h))
	if err != nil {
		return nil, err
	}
	s, _ := h.Snapshot()
	facts := map[string]any{
		"sandboxID": p.ID, "pid": s.Status().Pid, "bundle": b.bundleOf(h), "cgroup": s.Cgroup, "logPath": s.LogPath,
		"conmonPid": s.Conmon.Pid, "runtime": b.runtime.Path, "runtimeVersion": b.runtime.Version, "runtimeSpec": config,
	}
	if p.IDMap() != nil {
		facts["imageOwners"] = "mapped"
		if mappedLayerOf(p, b.bundleOf(h)).Copied() {
			facts["imageOwners"] = "copied"
		}
	}
	return facts, nil
}

func (b *Backend) inspectPod(p *sandbox.Pod) map[string]any {
	run := b.cfg.podRunDir(p.ID)
	at, files := shared.PinsOf(p, run), shared.FilesOf(p, run)
	cgroup, _ := b.cgroups.pod(p)
	pid := 0
	if state, err := readPodState(run); err == nil {
		pid = state.Pause.Pid
	}
	return map[string]any{
		"sandboxID": p.ID, "pid": pid, "runDir": run, "cgroup": cgroup, "shm": files.Shm,
		"namespaces": map[string]string{"net": at.Net, "ipc": at.IPC, "uts": at.UTS, "pid": at.PID, "user": at.User},
		"runtime":    b.runtime.Path, "runtimeVersion": b.runtime.Version,
	}
}
