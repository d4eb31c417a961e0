package wasm

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/collector"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
	"github.com/tripod-run/tripod/internal/stats"
)

// freshFor is how long a worker's statistics are reused. A kubelet asks for each pod in turn, but a worker reports all
// pods in one reply.
const freshFor = 500 * time.Millisecond

// figures caches each worker's latest statistics. A worker that does not reply delays only requests for its own pods.
type figures struct {
	mu sync.Mutex
	of map[*workers.Worker]*answer
}

// answer holds a worker's latest statistics. Sending to the channel turn locks the answer, and receiving from turn
// unlocks the answer.
type answer struct {
	turn chan struct{}
	at   time.Time
	pods map[string]workerapi.Stats
}

func (f *figures) answerOf(w *workers.Worker) *answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.of == nil {
		f.of = map[*workers.Worker]*answer{}
	}
	if f.of[w] == nil {
		f.of[w] = &answer{turn: make(chan struct{}, 1)}
	}
	return f.of[w]
}

// forget removes a worker that has ended.
func (f *figures) forget(w *workers.Worker) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.of, w)
}

// figuresOf returns the statistics of a running container. If the worker does not know about the container, the
// container has just ended, and figuresOf returns errdefs.ErrFailedPrecondition.
func (b *Backend) figuresOf(ctx context.Context, l *life, id string) (workerapi.Stats, error) {
	pods, err := b.figures.ask(ctx, l.worker, id)
	if err != nil {
		return workerapi.Stats{}, err
	}
	s, there := pods[id]
	if !there {
		return s, &notRunning{id}
	}
	return s, nil
}

// ask returns a worker's statistics by pod. They are at most freshFor old, and have the given pod if the worker knows it.
// An empty ID stands for any pod.
func (f *figures) ask(ctx context.Context, w *workers.Worker, id string) (map[string]workerapi.Stats, error) {
	a := f.answerOf(w)
	select {
	case a.turn <- struct{}{}:
		defer func() { <-a.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the statistics of worker %s: %w", w.Name, context.Cause(ctx))
	}
	if _, there := a.pods[id]; (there || id == "") && time.Since(a.at) <= freshFor {
		return a.pods, nil
	}
	list, err := w.Conn().Stats(ctx)
	if err != nil {
		return nil, err
	}
	a.at, a.pods = time.Now(), byID(list)
	return a.pods, nil
}

// shareOfWorker is the memory, in bytes, that a worker needs for a pod besides the guests' memory: sockets, a server
// and its goroutines. TestIdleServerMemory in package dataplane measures it. Without this share, an idle component
// would use no memory, and metrics-server would omit the pod.
const shareOfWorker = 32 << 10

// asCgroup converts a container's statistics to the form of a cgroup's statistics. The memory is the guests' memory
// plus shareOfWorker. There is no page cache.
func (l *life) asCgroup(s workerapi.Stats) stats.Figures {
	limit := l.memory.Load()
	f := stats.Figures{Time: s.Time}
	f.CPU = s.CPUNanos
	used := s.MemoryBytes + shareOfWorker
	f.Memory.Usage, f.Memory.WorkingSet, f.Memory.RSS, f.Memory.Limit = used, used, used, stats.Unlimited
	if limit > 0 {
		f.Memory.Limit = uint64(limit)
	}
	return f
}

// ContainerStats implements sandbox.StatsProvider. The result is empty if the container is not running.
func (b *Backend) ContainerStats(ctx context.Context, _ *sandbox.Pod, c *sandbox.Container) (*runtimeapi.ContainerStats, error) {
	result, _, _, err := b.containerStats(ctx, c.ID)
	return result, err
}

// ContainerSamples implements sandbox.StatsProvider. The samples are the worker's figures about the pod. If the pod has
// a worker of its own, the rest comes from the worker's cgroup; a shared worker cannot tell the pods' shares apart. For a
// foreign container, all that the cgroup measures comes from there.
func (b *Backend) ContainerSamples(ctx context.Context, _ *sandbox.Pod,
	c *sandbox.Container) (*runtimeapi.ContainerStats, stats.Samples, error) {
	result, figures, l, err := b.containerStats(ctx, c.ID)
	if l == nil {
		return result, nil, err
	}
	var samples stats.Samples
	if w := l.worker; workers.IsOwn(w.Scope) && w.Cgroup != "" {
		if _, all, err := stats.ReadAll(w.Cgroup, w.Proc.Pid); err == nil {
			samples = all
		}
	}
	if own := b.foreignFigures(l); own != nil {
		samples.Replace(requestSamples(figures))
	} else {
		samples.Replace(guestSamples(figures))
	}
	return result, samples, nil
}

// containerStats returns a container's statistics, the worker's figures that they are from, and the container's life.
// The life is nil if the container is not running.
func (b *Backend) containerStats(ctx context.Context, id string) (*runtimeapi.ContainerStats, workerapi.Stats, *life, error) {
	result := &runtimeapi.ContainerStats{}
	s, l, err := b.runFigures(ctx, id)
	if l == nil {
		return result, s, nil, err
	}
	f := l.asCgroup(s)
	if own := b.foreignFigures(l); own != nil {
		f = *own
	}
	result.Cpu, result.Memory = b.sampler.CPUUsage(id, f), f.MemoryUsage()
	return result, s, l, nil
}

// guestSamples returns what a worker knows about one of its pods.
func guestSamples(w workerapi.Stats) (s stats.Samples) {
	used := float64(w.MemoryBytes + shareOfWorker)
	s.Add(stats.CPUUsage, float64(w.CPUNanos)/float64(time.Second), "total")
	s.Add(stats.CFSThrottledTime, float64(w.ThrottledNanos)/float64(time.Second))
	s.Add(stats.MemoryUsage, used)
	s.Add(stats.MemoryWorkingSet, used)
	s.Add(stats.MemoryRSS, used)
	s.Add(stats.MemoryMaxUsage, max(used, float64(w.PeakBytes+shareOfWorker)))
	s.Add(stats.OOMEvents, float64(w.OutOfMemory))
	return append(s, requestSamples(w)...)
}

// requestSamples returns what no cgroup measures.
func requestSamples(w workerapi.Stats) (s stats.Samples) {
	s.Add(stats.FileDescriptors, float64(w.Holdings.Files)+float64(w.Connections))
	s.Add(stats.Sockets, float64(w.Connections))
	s.Add(stats.Requests, float64(w.Requests))
	return s
}

// foreignFigures returns the statistics of a foreign container's cgroup, whose limits are the container's. It returns nil
// if the container is not foreign or has no cgroup.
func (b *Backend) foreignFigures(l *life) *stats.Figures {
	if !sandbox.IsForeign(l.pod, l.container) {
		return nil
	}
	return l.worker.Figures()
}

// PodStats implements sandbox.StatsProvider. It measures the pod's own worker if there is one, otherwise the container.
func (b *Backend) PodStats(ctx context.Context, p *sandbox.Pod) (*runtimeapi.LinuxPodSandboxStats, error) {
	result := &runtimeapi.LinuxPodSandboxStats{}
	if _, l, err := b.ledger.GetRun(p.ID, p.ID); err == nil {
		if f := l.worker.Figures(); f != nil {
			result.Cpu, result.Memory, result.Process = b.sampler.CPUUsage("pod "+p.ID, *f), f.MemoryUsage(), f.ProcessUsage()
			return result, nil
		}
	}
	container, _, _, err := b.containerStats(ctx, p.ID)
	result.Cpu, result.Memory = container.Cpu, container.Memory
	return result, err
}

// runFigures returns a container's figures and its life, which is nil if the container is not running.
func (b *Backend) runFigures(ctx context.Context, id string) (s workerapi.Stats, _ *life, err error) {
	_, l, err := b.ledger.FindRun(id, id)
	if l == nil {
		return s, nil, err
	}
	s, err = b.figuresOf(ctx, l, id)
	if errdefs.IsFailedPrecondition(err) {
		return s, nil, nil // the container has just ended
	}
	if err != nil {
		return s, nil, err
	}
	return s, l, nil
}

// Inspect implements sandbox.Inspector.
func (b *Backend) Inspect(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (map[string]any, error) {
	v := map[string]any{"sandboxID": p.ID, "runDir": b.cfg.podDir(p.ID), "authority": b.tls.CertFile()}
	if o, err := b.optionsOf(p, c); err == nil {
		v["ports"] = map[string]any{"tls": o.Port, "quic": o.Port, "cleartext": o.Cleartext, "certificate": o.TLS}
		if o.Store == annotations.StoreOfNode {
			v["pairs"] = storesDir(b.cfg.Root)
		}
		if o.Blobs != "" {
			v["objects"] = o.Blobs
		}
	}
	b.mu.Lock()
	if why := b.sandboxes[p.ID].OwnWorkerReason; why != "" {
		v["apart"] = why
	}
	b.mu.Unlock()
	if sandbox.IsForeign(p, c) {
		v["apart"], v["runDir"] = "it belongs to a pod with other containers", b.cfg.podDir(c.ID)
	}
	if c != nil {
		if err := b.inspectContainer(ctx, c.ID, v); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (b *Backend) inspectContainer(ctx context.Context, id string, v map[string]any) error {
	h, err := b.ledger.Find(id, id)
	if h == nil {
		return err
	}
	s, l := h.Snapshot()
	v["pid"], v["worker"], v["component"] = s.Status().Pid, s.Worker, s.Component
	if s.Artifact != nil {
		v["wasm"], v["code"] = s.Artifact.Wasm.Digest, b.cache.EntryDir(s.Artifact.Wasm.Digest.String())
	}
	if l == nil {
		return nil
	}
	v["quickCode"] = l.quick.Load()
	v["workerEngine"], v["workerProgram"] = l.worker.Conn().Hello().Engine, l.worker.Conn().Hello().Program
	figures, err := b.figuresOf(ctx, l, id)
	if err == nil {
		v["figures"] = figures
	}
	if errdefs.IsFailedPrecondition(err) {
		return nil // the container has just ended
	}
	return err
}

// metrics returns the counters of all running containers. It omits workers that do not reply.
func (b *Backend) metrics(ctx context.Context) []collector.Workload {
	var all []collector.Workload
	for _, w := range b.keeper.All() {
		counters, err := w.Conn().Metrics(ctx)
		if err == nil {
			all = append(all, b.withFigures(ctx, w, counters)...)
		} else {
			b.log.Debug("get worker metrics failed", "worker", w.Name, "err", err)
		}
	}
	return all
}

func (b *Backend) withFigures(ctx context.Context, w *workers.Worker, counters []workerapi.Metrics) []collector.Workload {
	stats, err := b.figures.ask(ctx, w, "")
	if err != nil {
		b.log.Debug("get worker statistics failed", "worker", w.Name, "err", err)
	}
	all := make([]collector.Workload, 0, len(counters))
	for _, m := range counters {
		all = append(all, collector.Workload{Metrics: m, Stats: stats[m.ID]})
	}
	return all
}

func byID(list []workerapi.Stats) map[string]workerapi.Stats {
	pods := make(map[string]workerapi.Stats, len(list))
	for _, s := range list {
		pods[s.ID] = s
	}
	return pods
}
