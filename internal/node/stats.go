package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stats"
)

const (
	// statsTimeout limits how long one unresponsive pod can delay a list of statistics.
	statsTimeout = 2 * time.Second
	// statsWorkers is the number of pods that are measured concurrently.
	statsWorkers = 8
)

// ContainerStats returns a container's statistics. Errors: ErrNotFound, ErrNotImplemented, or the backend's own errors.
func (n *Node) ContainerStats(ctx context.Context, id string) (*runtimeapi.ContainerStats, error) {
	c, p, err := n.Container(id)
	if err != nil {
		return nil, err
	}
	return n.containerStats(ctx, p, c, now)
}

// ContainersStats returns the statistics of many containers, which may be as old as Config.StatsInterval. It omits
// containers that cannot be measured.
func (n *Node) ContainersStats(ctx context.Context, containers []*Container) []*runtimeapi.ContainerStats {
	return measure(ctx, n, containers, func(c *Container) string { return c.ID },
		func(ctx context.Context, c *Container) (*runtimeapi.ContainerStats, error) {
			p, err := n.Pod(c.PodID)
			if err != nil {
				return nil, err
			}
			return n.containerStats(ctx, p, c, recent)
		})
}

// PodStats returns the statistics of a pod, its network and its containers. The errors are those of ContainerStats.
func (n *Node) PodStats(ctx context.Context, id string) (*runtimeapi.PodSandboxStats, error) {
	p, err := n.Pod(id)
	if err != nil {
		return nil, err
	}
	return n.podStats(ctx, p, now)
}

// PodsStats is like ContainersStats, for pods.
func (n *Node) PodsStats(ctx context.Context, pods []*Pod) []*runtimeapi.PodSandboxStats {
	return measure(ctx, n, pods, podID, func(ctx context.Context, p *Pod) (*runtimeapi.PodSandboxStats, error) {
		return n.podStats(ctx, p, recent)
	})
}

func podID(p *Pod) string { return p.ID }

// measure calls the function for many pods or containers, a few at a time, and returns the results of the calls that
// succeed. It waits at most statsTimeout for each call, so that a call that hangs (a process in uninterruptible sleep,
// a silent machine) does not delay the others.
func measure[In, Out any](ctx context.Context, n *Node, things []In, id func(In) string,
	stats func(context.Context, In) (Out, error)) []Out {
	out, got := make([]Out, len(things)), make([]bool, len(things))
	var wg sync.WaitGroup
	queue := make(chan int)
	for range min(statsWorkers, len(things)) {
		wg.Go(func() {
			for i := range queue {
				value, err := withStatsTimeout(ctx, n, id(things[i]), func(ctx context.Context) (Out, error) { return stats(ctx, things[i]) })
				out[i], got[i] = value, err == nil
			}
		})
	}
	for i := range things {
		queue <- i
	}
	close(queue)
	wg.Wait()
	kept := out[:0]
	for i, value := range out {
		if got[i] {
			kept = append(kept, value)
		}
	}
	return kept
}

// withStatsTimeout calls work and waits at most statsTimeout for it. If the call takes longer, further calls for the
// same ID fail until the slow call returns. Work that hangs forever therefore costs only one goroutine.
func withStatsTimeout[Out any](ctx context.Context, n *Node, id string, work func(context.Context) (Out, error)) (Out, error) {
	type result struct {
		value Out
		err   error
	}
	var none Out
	if _, hangs := n.silent.Load(id); hangs {
		return none, fmt.Errorf("%s has not answered the previous request: %w", id, errdefs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	done := make(chan result, 1)
	go func() {
		var r result
		r.err = guard.Call(n.log, "stats", func() (err error) {
			r.value, err = work(ctx)
			return err
		})
		done <- r
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
	}
	n.silent.Store(id, nil)
	go func() {
		<-done
		n.silent.Delete(id)
	}()
	return none, context.Cause(ctx)
}

// figures holds the measurements that lists share.
type figures struct {
	containers shared[containerFigures]
	pods       shared[*runtimeapi.LinuxPodSandboxStats]
	networks   shared[[]network.InterfaceStats]
}

func newFigures(fresh time.Duration) *figures {
	f := &figures{}
	f.containers.fresh, f.pods.fresh, f.networks.fresh = fresh, fresh, fresh
	return f
}

// containerFigures are the statistics of a container and, if they were asked for, its samples.
type containerFigures struct {
	stats   *runtimeapi.ContainerStats
	samples stats.Samples
	sampled bool
	at      time.Time
}

// demand says how recent and how detailed figures must be.
type demand int

const (
	// now: measured for this call.
	now demand = iota
	// recent: measured within Config.StatsInterval.
	recent
	// recentSamples: like recent, with samples.
	recentSamples
)

func (n *Node) containerStats(ctx context.Context, p *Pod, c *Container, want demand) (*runtimeapi.ContainerStats, error) {
	f, err := n.containerFigures(ctx, p, c, want)
	return f.stats, err
}

func (n *Node) containerFigures(ctx context.Context, p *Pod, c *Container, want demand) (containerFigures, error) {
	enough := func(f containerFigures) bool { return want == recent || want == recentSamples && f.sampled }
	return n.figures.containers.get(ctx, measured{c.ID, c.State, c.StartedAt.UnixNano()}, enough, func() (containerFigures, error) {
		return n.measureContainer(ctx, p, c, want == recentSamples)
	})
}

func (n *Node) measureContainer(ctx context.Context, p *Pod, c *Container, samples bool) (f containerFigures, err error) {
	provider, err := n.provider(p.handlerOf(c))
	if err != nil {
		return f, err
	}
	f = containerFigures{stats: &runtimeapi.ContainerStats{}, sampled: samples, at: time.Now()}
	switch {
	case p.previous(c.ID) != nil: // the backend knows only the newest attempt
	case samples:
		f.stats, f.samples, err = provider.ContainerSamples(ctx, p.sandboxPod(), c.sandboxContainer())
	default:
		f.stats, err = provider.ContainerStats(ctx, p.sandboxPod(), c.sandboxContainer())
	}
	if err != nil {
		return f, err
	}
	f.stats.Attributes = &runtimeapi.ContainerAttributes{
		Id: c.ID, Metadata: c.Config.GetMetadata(), Labels: c.Config.GetLabels(), Annotations: c.Config.GetAnnotations(),
	}
	return f, nil
}

func (n *Node) podStats(ctx context.Context, p *Pod, want demand) (*runtimeapi.PodSandboxStats, error) {
	provider, err := n.provider(p.Handler)
	if err != nil {
		return nil, err
	}
	whole, err := n.figures.pods.get(ctx, p.measured(), func(*runtimeapi.LinuxPodSandboxStats) bool { return want != now },
		func() (*runtimeapi.LinuxPodSandboxStats, error) { return provider.PodStats(ctx, p.sandboxPod()) })
	if err != nil {
		return nil, err
	}
	figures := &runtimeapi.LinuxPodSandboxStats{Cpu: whole.Cpu, Memory: whole.Memory, Io: whole.Io, Process: whole.Process}
	if p.Ready() && p.Netns != "" {
		interfaces, err := n.interfaces(ctx, p, want)
		if err != nil {
			return nil, err
		}
		figures.Network = networkUsage(interfaces)
	}
	for _, c := range p.Containers {
		if c.State != Running {
			continue
		}
		if stats, err := n.containerStats(ctx, p, c, want); err == nil {
			figures.Containers = append(figures.Containers, stats)
		}
	}
	return &runtimeapi.PodSandboxStats{
		Attributes: &runtimeapi.PodSandboxAttributes{
			Id: p.ID, Metadata: p.Config.GetMetadata(), Labels: p.Config.GetLabels(), Annotations: p.Config.GetAnnotations(),
		},
		Linux: figures,
	}, nil
}

// interfaces returns the traffic of a pod's interfaces.
func (n *Node) interfaces(ctx context.Context, p *Pod, want demand) ([]network.InterfaceStats, error) {
	return n.figures.networks.get(ctx, p.measured(), func([]network.InterfaceStats) bool { return want != now },
		func() ([]network.InterfaceStats, error) { return n.Network.Stats(p.Netns) })
}

func (p *Pod) measured() measured { return measured{id: p.ID, state: p.State} }

func (n *Node) provider(handler string) (sandbox.StatsProvider, error) {
	provider, ok := n.Backends[handler].(sandbox.StatsProvider)
	if !ok {
		return nil, unsupported(handler, "statistics")
	}
	if err := n.handlerErrors.get(handler); err != nil {
		return nil, notReady(handler, err)
	}
	return provider, nil
}

// networkUsage converts the traffic of a pod's interfaces; eth0 is the default interface.
func networkUsage(interfaces []network.InterfaceStats) *runtimeapi.NetworkUsage {
	usage := &runtimeapi.NetworkUsage{Timestamp: time.Now().UnixNano()}
	for _, s := range interfaces {
		switch s.Name {
		case "lo":
		case "eth0":
			usage.DefaultInterface = interfaceUsage(s)
		default:
			usage.Interfaces = append(usage.Interfaces, interfaceUsage(s))
		}
	}
	return usage
}

func interfaceUsage(s network.InterfaceStats) *runtimeapi.NetworkInterfaceUsage {
	value := func(v uint64) *runtimeapi.UInt64Value { return &runtimeapi.UInt64Value{Value: v} }
	return &runtimeapi.NetworkInterfaceUsage{
		Name: s.Name, RxBytes: value(s.RxBytes), RxErrors: value(s.RxErrors), TxBytes: value(s.TxBytes), TxErrors: value(s.TxErrors),
	}
}
