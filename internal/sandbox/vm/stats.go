package vm

import (
	"context"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/stats"
)

// askTime bounds each query to a guest or a hypervisor. Either may hang.
const askTime = time.Second

// ContainerStats implements sandbox.StatsProvider. The statistics come from the cgroup, with two exceptions: the root
// disk's size is that of the overlay file on the node, and the memory is the guest's if an agent answers. For a stopped
// machine, ContainerStats reports only the root disk.
func (b *Backend) ContainerStats(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (*runtimeapi.ContainerStats, error) {
	result := &runtimeapi.ContainerStats{WritableLayer: b.rootDisk(c.ID)}
	s, l, err := b.runningIn(p.ID, c.ID)
	if l == nil {
		return result, err
	}
	f, err := stats.Read(s.Definition.Cgroup)
	if errdefs.IsNotFound(err) {
		return result, nil // the machine has just ended
	}
	if err != nil {
		return nil, err
	}
	b.fill(result, p, c, f, l.guestFigures(ctx))
	return result, nil
}

// ContainerSamples implements sandbox.StatsProvider. CPU, memory and processes are those of the machine's cgroup. The
// file systems are the guest's if an agent answers, otherwise the one with the root disk's overlay. Reads and writes are
// those that the guest requested from its disks, if the hypervisor answers.
func (b *Backend) ContainerSamples(ctx context.Context, p *sandbox.Pod,
	c *sandbox.Container) (*runtimeapi.ContainerStats, stats.Samples, error) {
	result := &runtimeapi.ContainerStats{WritableLayer: b.rootDisk(c.ID)}
	s, l, err := b.runningIn(p.ID, c.ID)
	if l == nil {
		return result, nil, err
	}
	f, samples, err := stats.ReadAll(s.Definition.Cgroup, s.Pid)
	if errdefs.IsNotFound(err) {
		return result, nil, nil // the machine has just ended
	}
	if err != nil {
		return nil, nil, err
	}
	guest := l.guestFigures(ctx)
	b.fill(result, p, c, f, guest)
	if guest != nil {
		samples.Replace(guestMemory(result.Memory))
	}
	if guest != nil && len(guest.Filesystems) > 0 {
		samples.Replace(guestFilesystems(guest))
	} else {
		samples.Filesystem(b.cfg.Root, result.WritableLayer.GetUsedBytes())
	}
	asking, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	if machine, err := b.cfg.Driver.Stats(asking, c.ID); err == nil {
		samples.Replace(diskSamples(machine.Blocks))
	}
	return result, samples, nil
}

func guestMemory(m *runtimeapi.MemoryUsage) (s stats.Samples) {
	s.Add(stats.MemoryUsage, float64(m.UsageBytes.Value))
	s.Add(stats.MemoryWorkingSet, float64(m.WorkingSetBytes.Value))
	return s
}

func guestFilesystems(guest *agent.Stats) (s stats.Samples) {
	for _, f := range guest.Filesystems {
		s.Add(stats.FSUsage, float64(f.Total-min(f.Free, f.Total)), f.Source)
		s.Disk(f.Source, f.Total, f.Inodes, f.InodesFree)
	}
	return s
}

func diskSamples(disks map[string]machine.BlockStats) (s stats.Samples) {
	for id, d := range disks {
		s.Add(stats.FSReads, float64(d.ReadOps), id)
		s.Add(stats.FSReadBytes, float64(d.ReadBytes), id)
		s.Add(stats.FSWrites, float64(d.WriteOps), id)
		s.Add(stats.FSWriteBytes, float64(d.WriteBytes), id)
	}
	return s
}

// runningIn returns the state and the life of a container. The life is nil if the container does not run.
func (b *Backend) runningIn(pod, id string) (s state, l *life, err error) {
	h, err := b.ledger.Find(pod, id)
	if h != nil {
		s, l = h.Snapshot()
	}
	return s, l, err
}

// fill adds the figures of a machine's cgroup and, if an agent answered, of its guest. The container's limit is the guest's
// memory, so its usage is what the guest cannot give up. A kubelet compares the two before it shrinks a container. What
// QEMU holds, which includes the guest's caches, is in the pod's figures.
func (b *Backend) fill(result *runtimeapi.ContainerStats, p *sandbox.Pod, c *sandbox.Container, f stats.Figures, guest *agent.Stats) {
	result.Cpu, result.Memory, result.Swap, result.Io = b.sampler.CPUUsage(c.ID, f), f.MemoryUsage(), f.SwapUsage(), f.IOUsage()
	if guest == nil {
		return
	}
	size := b.memory(sandbox.Resources(p, c))
	available := min(guest.MemoryAvailable, size)
	result.Memory.AvailableBytes = &runtimeapi.UInt64Value{Value: available}
	result.Memory.UsageBytes = &runtimeapi.UInt64Value{Value: size - available}
	result.Memory.WorkingSetBytes = &runtimeapi.UInt64Value{Value: size - available}
}

// guestFigures returns the guest's statistics from its agent, or nil if no agent answers.
func (l *life) guestFigures(ctx context.Context) *agent.Stats {
	a := l.agent.Load()
	if a == nil || !a.Ready() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	figures, err := a.Stats(ctx)
	if err != nil {
		return nil
	}
	return &figures
}

// rootDisk returns the disk usage of the root disk's overlay, or nil if the machine has no overlay.
func (b *Backend) rootDisk(id string) *runtimeapi.FilesystemUsage {
	var st unix.Stat_t
	if err := unix.Stat(b.cfg.overlayFile(id), &st); err != nil {
		return nil
	}
	return &runtimeapi.FilesystemUsage{
		Timestamp:  time.Now().UnixNano(),
		FsId:       &runtimeapi.FilesystemIdentifier{Mountpoint: b.cfg.Root},
		UsedBytes:  &runtimeapi.UInt64Value{Value: uint64(st.Blocks) * 512},
		InodesUsed: &runtimeapi.UInt64Value{Value: 1},
	}
}

// PodStats implements sandbox.StatsProvider. It reports the statistics of the pod's cgroup.
func (b *Backend) PodStats(_ context.Context, p *sandbox.Pod) (*runtimeapi.LinuxPodSandboxStats, error) {
	result := &runtimeapi.LinuxPodSandboxStats{}
	sb, err := b.sandbox(p.ID)
	if errdefs.IsNotFound(err) {
		return result, nil
	}
	if err != nil {
		return nil, err
	}
	f, err := stats.Read(sb.state.Cgroup)
	if errdefs.IsNotFound(err) {
		return result, nil
	}
	if err != nil {
		return nil, err
	}
	result.Cpu, result.Memory, result.Io, result.Process = b.sampler.CPUUsage("pod "+p.ID, f), f.MemoryUsage(), f.IOUsage(), f.ProcessUsage()
	return result, nil
}

// Inspect implements sandbox.Inspector.
func (b *Backend) Inspect(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (map[string]any, error) {
	v := map[string]any{"sandboxID": p.ID, "driver": b.cfg.Driver.Name(), "runDir": b.cfg.podDir(p.ID)}
	if sb, err := b.sandbox(p.ID); err == nil {
		v["user"], v["cgroup"], v["warnings"] = sb.state.UID, sb.state.Cgroup, sb.state.Warnings
	}
	if interfaces, err := b.cfg.Network.Read(b.cfg.tapsFile(p.ID)); err == nil {
		v["interfaces"] = interfaces
	}
	if b.templates != nil {
		if err := b.templates.Inspect(ctx, p, v); err != nil {
			return nil, err
		}
	}
	if c != nil {
		if err := b.inspectContainer(ctx, p, c.ID, v); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (b *Backend) inspectContainer(ctx context.Context, p *sandbox.Pod, id string, v map[string]any) error {
	h, err := b.ledger.Find(id, id)
	if h == nil {
		return err
	}
	s, l := h.Snapshot()
	v["pid"], v["phase"], v["layout"], v["definition"], v["stateDir"] = s.Status().Pid, s.Phase, s.Layout, s.Definition, b.cfg.diskDir(id)
	if len(s.Warnings) > 0 {
		v["cloudInitWarnings"] = s.Warnings
	}
	if why := b.shortage(p, s.Definition.Memory); why != "" {
		v["memoryWarning"] = why
	}
	if l == nil {
		return nil
	}
	if len(s.Hotplugged) > 0 {
		v["disks"] = s.Hotplugged
	}
	if b.cfg.Accel != nil {
		asking, cancel := context.WithTimeout(ctx, askTime)
		defer cancel()
		if accel, why, err := b.cfg.Accel(asking); err == nil {
			v["accel"] = map[string]string{"name": accel, "why": why}
		}
	}
	v["agent"] = l.inspectAgent(ctx)
	asking, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	if figures, err := b.cfg.Driver.Stats(asking, id); err == nil {
		v["figures"] = figures
	} else {
		v["figures"] = err.Error()
	}
	return nil
}

// inspectAgent returns whether the guest's agent answers, and what the agent reports about the guest.
func (l *life) inspectAgent(ctx context.Context) map[string]any {
	a := l.agent.Load()
	if a == nil || !a.Ready() {
		return map[string]any{"ready": false}
	}
	v := map[string]any{"ready": true}
	asking, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	if info, err := a.Info(asking); err == nil {
		v["info"] = info
	}
	return v
}
