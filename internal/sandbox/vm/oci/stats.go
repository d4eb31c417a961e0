package oci

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/stats"
)

const (
	// scratchOwn is what a scratch disk can take in bytes beyond the writable layers: tables of its file system, and logs that
	// are not read yet.
	scratchOwn = 256 << 20
	// askTime bounds a question to a guest about statistics.
	askTime = time.Second
	// trimPeriod is the time between two orders to a guest to give back the room of deleted files.
	trimPeriod = time.Minute
	// mostCount is the largest count that is reported. A float64 has it exactly.
	mostCount = 1 << 53
	// mostSamples is the largest number of samples that a container has, and mostLabel the longest label in bytes.
	mostSamples, mostLabel = 1000, 128
)

// layerUsage is what the guest has said about a container's writable layer, and what the scratch disk took on the node just
// before. Both are in bytes.
type layerUsage struct{ used, disk uint64 }

// ContainerStats implements sandbox.StatsProvider. The numbers are the guest's, as far as they can be true; the times and the
// file system are the node's. If the guest does not answer, only the writable layer is reported.
func (o *Backend) ContainerStats(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (*runtimeapi.ContainerStats, error) {
	said := &runtimeapi.ContainerStats{}
	return o.containerStats(ctx, p, c, func(ctx context.Context) (*runtimeapi.ContainerStats, error) {
		return said, o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodStats, Container: c.ID}, nil, said)
	})
}

// ContainerSamples implements sandbox.StatsProvider. The samples are the guest's, but for those about file systems.
func (o *Backend) ContainerSamples(ctx context.Context, p *sandbox.Pod,
	c *sandbox.Container) (*runtimeapi.ContainerStats, stats.Samples, error) {
	var said guestapi.Figures
	result, err := o.containerStats(ctx, p, c, func(ctx context.Context) (*runtimeapi.ContainerStats, error) {
		err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodSamples, Container: c.ID}, nil, &said)
		return said.Stats, err
	})
	samples := guestSamples(said.Samples)
	if samples != nil {
		samples.Filesystem(o.cfg.Root, result.GetWritableLayer().GetUsedBytes())
	}
	return result, samples, err
}

var familyByName = sync.OnceValue(func() map[string]*stats.Family {
	families := map[string]*stats.Family{}
	for _, f := range stats.Families {
		families[f.Name] = f
	}
	return families
})

// guestSamples returns those samples of a guest that can be true. None is there twice: a kubelet would report nothing at all.
func guestSamples(said []guestapi.Sample) (samples stats.Samples) {
	known := map[string]bool{}
	for _, s := range said[:min(len(said), mostSamples)] {
		f := familyByName()[s.Family]
		odd := func(label string) bool { return len(label) > mostLabel || !utf8.ValidString(label) }
		if f == nil || len(s.Labels) != len(f.Labels) || slices.ContainsFunc(s.Labels, odd) || strings.HasPrefix(s.Family, "container_fs_") {
			continue
		}
		key := s.Family + "\x00" + strings.Join(s.Labels, "\x00")
		if known[key] {
			continue
		}
		known[key] = true
		samples.Add(f, min(max(s.Value, 0), mostCount), s.Labels...)
	}
	return samples
}

// containerStats is ContainerStats with the question to the guest.
func (o *Backend) containerStats(ctx context.Context, p *sandbox.Pod, c *sandbox.Container,
	ask func(context.Context) (*runtimeapi.ContainerStats, error)) (*runtimeapi.ContainerStats, error) {
	result := &runtimeapi.ContainerStats{}
	pod, err := o.running(p.ID)
	if err != nil {
		return result, nil
	}
	m, err := o.machines.Machine(p.ID)
	if errdefs.IsFailedPrecondition(err) {
		return result, nil // it has just been removed
	}
	if err != nil {
		return result, err
	}
	layer := layerUsage{disk: o.scratchUse(p.ID)}
	asking, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	said, err := ask(asking)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		o.log.Debug("a guest does not say what a container uses", "container", c.ID, "err", err)
		said = &runtimeapi.ContainerStats{}
	}
	layer.used = min(said.GetWritableLayer().GetUsedBytes().GetValue(), scratchSize)
	b := o.boundsOf(m)
	result.Cpu, result.Memory, result.Swap, result.Io = b.cpu(c.ID, said.GetCpu(), o.sampler), b.memory(said.GetMemory()),
		b.swap(said.GetSwap()), b.io(said.GetIo())
	result.WritableLayer = &runtimeapi.FilesystemUsage{
		Timestamp:  b.now.UnixNano(),
		FsId:       &runtimeapi.FilesystemIdentifier{Mountpoint: o.cfg.Root},
		UsedBytes:  &runtimeapi.UInt64Value{Value: o.layerUse(pod, p.ID, c.ID, layer)},
		InodesUsed: &runtimeapi.UInt64Value{Value: 1}, // the disk is a file
	}
	return result, nil
}

// scratchUse returns what a pod's scratch disk takes on the node, in bytes.
func (o *Backend) scratchUse(pod string) uint64 {
	var st unix.Stat_t
	if err := unix.Stat(o.cfg.ScratchFile(pod, guestapi.ScratchSerial), &st); err != nil {
		return 0
	}
	return uint64(st.Blocks) * 512
}

// layerUse records what the guest says about a layer and returns what the container uses. What the disk takes beyond all
// layers and scratchOwn is added to the running container with the lowest ID, so that a guest cannot hide it. This waits
// until the guest was asked about all running containers, and until it has had an occasion to give back the room of deleted
// files. The disk's least use at these times counts, because what one container has written after the guest was asked about it
// would be added to another one.
func (o *Backend) layerUse(pod *podMachine, podID, id string, layer layerUsage) uint64 {
	var running []string
	for _, h := range o.ledger.All() {
		if _, l := h.Snapshot(); l != nil && h.PodID == podID {
			running = append(running, h.ID)
		}
	}
	if !slices.Contains(running, id) {
		return layer.used
	}
	pod.layersMu.Lock()
	defer pod.layersMu.Unlock()
	layers := map[string]layerUsage{}
	for _, other := range running {
		if known, ok := pod.layers[other]; ok {
			layers[other] = known
		}
	}
	layers[id], pod.layers = layer, layers
	if id != slices.Min(running) || len(layers) < len(running) {
		return layer.used
	}
	disk, all := layer.disk, uint64(scratchOwn)
	for _, l := range layers {
		disk, all = min(disk, l.disk), all+l.used
	}
	more := disk - min(all, disk)
	if more > 0 && time.Since(pod.trimmed) > trimPeriod {
		pod.trimmed = time.Now()
		o.tasks.Go(guard.Func(o.log, "trim of a scratch disk", func() { o.trim(podID) }))
		return layer.used
	}
	return layer.used + more
}

// trim makes a guest give back the room that deleted files took on the node.
func (o *Backend) trim(pod string) {
	ctx, cancel := context.WithTimeout(o.ctx, trimPeriod)
	defer cancel()
	if err := o.call(ctx, pod, guestapi.Request{Method: guestapi.MethodTrim}, nil, nil); err != nil && ctx.Err() == nil {
		o.log.Warn("a guest does not give back the room of deleted files", "pod", pod, "err", err)
	}
}

// statsBounds bounds the numbers of a guest by what its machine has.
type statsBounds struct {
	now   time.Time
	age   uint64 // of the machine, in nanoseconds
	cpus  uint64
	bytes uint64 // of memory
}

func (o *Backend) boundsOf(m vm.Machine) statsBounds {
	now := time.Now()
	memory, err := o.machines.Cgroups().Memory(m.Definition.Cgroup)
	if err != nil || memory == 0 {
		memory = m.Definition.MostMemory()
	}
	return statsBounds{now: now, age: uint64(max(now.Sub(m.StartedAt), 0)), cpus: uint64(m.CPUs), bytes: memory}
}

func atMost(v *runtimeapi.UInt64Value, most uint64) *runtimeapi.UInt64Value {
	if v == nil {
		return nil
	}
	return &runtimeapi.UInt64Value{Value: min(v.Value, most)}
}

// cpu computes the rate on the node, from what the guest has used by the node's clock.
func (b statsBounds) cpu(id string, said *runtimeapi.CpuUsage, rates *stats.Sampler) *runtimeapi.CpuUsage {
	if said == nil {
		return nil
	}
	u := &runtimeapi.CpuUsage{Timestamp: b.now.UnixNano(), UsageCoreNanoSeconds: atMost(said.UsageCoreNanoSeconds, b.age*b.cpus),
		Psi: b.psi(said.Psi)}
	if rate, ok := rates.NanoCores(id, b.now, u.UsageCoreNanoSeconds.GetValue()); ok {
		u.UsageNanoCores = &runtimeapi.UInt64Value{Value: min(rate, b.cpus*uint64(time.Second))}
	}
	return u
}

func (b statsBounds) memory(said *runtimeapi.MemoryUsage) *runtimeapi.MemoryUsage {
	if said == nil {
		return nil
	}
	return &runtimeapi.MemoryUsage{
		Timestamp: b.now.UnixNano(), WorkingSetBytes: atMost(said.WorkingSetBytes, b.bytes), AvailableBytes: atMost(said.AvailableBytes, b.bytes),
		UsageBytes: atMost(said.UsageBytes, b.bytes), RssBytes: atMost(said.RssBytes, b.bytes),
		PageFaults: atMost(said.PageFaults, mostCount), MajorPageFaults: atMost(said.MajorPageFaults, mostCount), Psi: b.psi(said.Psi),
	}
}

func (b statsBounds) swap(said *runtimeapi.SwapUsage) *runtimeapi.SwapUsage {
	if said == nil {
		return nil
	}
	return &runtimeapi.SwapUsage{Timestamp: b.now.UnixNano(), SwapAvailableBytes: atMost(said.SwapAvailableBytes, b.bytes),
		SwapUsageBytes: atMost(said.SwapUsageBytes, b.bytes)}
}

func (b statsBounds) io(said *runtimeapi.IoUsage) *runtimeapi.IoUsage {
	if said == nil {
		return nil
	}
	return &runtimeapi.IoUsage{Timestamp: b.now.UnixNano(), Psi: b.psi(said.Psi)}
}

func (b statsBounds) psi(said *runtimeapi.PsiStats) *runtimeapi.PsiStats {
	if said == nil {
		return nil
	}
	return &runtimeapi.PsiStats{Full: b.stall(said.Full), Some: b.stall(said.Some)}
}

func (b statsBounds) stall(said *runtimeapi.PsiData) *runtimeapi.PsiData {
	if said == nil {
		return nil
	}
	percent := func(v float64) float64 { return min(max(v, 0), 100) }
	return &runtimeapi.PsiData{Total: min(said.Total, b.age), Avg10: percent(said.Avg10), Avg60: percent(said.Avg60),
		Avg300: percent(said.Avg300)}
}
