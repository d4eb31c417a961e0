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
	return n.containerStats(ctx, p, c)
}

// ContainersStats returns the statistics of many containers. It omits containers that cannot be measured.
func (n *Node) ContainersStats(ctx context.Context, containers []*Container) []*runtimeapi.ContainerStats {
	return measure(ctx, n, containers, func(c *Container) string { return c.ID }, func(ctx context.Context, c *Container) (*runtimeapi.ContainerStats, error) {
		p, err := n.Pod(c.PodID)
		if err != nil {
			return nil, err
		}
		return n.containerStats(ctx, p, c)
	})
}

// PodStats returns the statistics of a pod, its network and its containers. The errors are those of ContainerStats.
func (n *Node) PodStats(ctx context.Context, id string) (*runtimeapi.PodSandboxStats, error) {
	p, err := n.Pod(id)
	if err != nil {
		return nil, err
	}
	return n.podStats(ctx, p)
}

// PodsStats returns the statistics of many pods. It omits pods that cannot be measured.
func (n *Node) PodsStats(ctx context.Context, pods []*Pod) []*runtimeapi.PodSandboxStats {
	return measure(ctx, n, pods, func(p *Pod) string { return p.ID }, n.podStats)
}

// measure calls the function for many pods or containers, a few at a time, and returns the results of the calls that
// succeed. It waits at most statsTimeout for each call, so that a call that hangs (a process in uninterruptible sleep,
// a silent machine) does not delay the others.
func measure[In, Out any](ctx context.Context, n *Node, things []In, id func(In) string, stats func(context.Context, In) (Out, error)) []Out {
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

func (n *Node) containerStats(ctx context.Context, p *Pod, c *Container) (*runtimeapi.ContainerStats, error) {
	provider, err := n.provider(p)
	if err != nil {
		return nil, err
	}
	stats := &runtimeapi.ContainerStats{}
	if p.previous(c.ID) == nil { // the backend knows only the newest attempt
		if stats, err = provider.ContainerStats(ctx, p.sandboxPod(), c.sandboxContainer()); err != nil {
			return nil, err
		}
	}
	stats.Attributes = &runtimeapi.ContainerAttributes{
		Id: c.ID, Metadata: c.Config.GetMetadata(), Labels: c.Config.GetLabels(), Annotations: c.Config.GetAnnotations(),
	}
	return stats, nil
}

func (n *Node) podStats(ctx context.Context, p *Pod) (*runtimeapi.PodSandboxStats, error) {
	provider, err := n.provider(p)
	if err != nil {
		return nil, err
	}
	figures, err := provider.PodStats(ctx, p.sandboxPod())
	if err != nil {
		return nil, err
	}
	if p.Ready() && p.Netns != "" {
		if figures.Network, err = n.networkUsage(p.Netns); err != nil {
			return nil, err
		}
	}
	for _, c := range p.Containers {
		if c.State != Running {
			continue
		}
		if stats, err := n.containerStats(ctx, p, c); err == nil {
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

func (n *Node) provider(p *Pod) (sandbox.StatsProvider, error) {
	provider, ok := n.Backends[p.Handler].(sandbox.StatsProvider)
	if !ok {
		return nil, unsupported(p, "statistics")
	}
	if err := n.handlerErrors.get(p.Handler); err != nil {
		return nil, notReady(p.Handler, err)
	}
	return provider, nil
}

// networkUsage reads the traffic of a pod's interfaces; eth0 is the default interface.
func (n *Node) networkUsage(netns string) (*runtimeapi.NetworkUsage, error) {
	interfaces, err := n.Network.Stats(netns)
	if err != nil {
		return nil, err
	}
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
	return usage, nil
}

func interfaceUsage(s network.InterfaceStats) *runtimeapi.NetworkInterfaceUsage {
	value := func(v uint64) *runtimeapi.UInt64Value { return &runtimeapi.UInt64Value{Value: v} }
	return &runtimeapi.NetworkInterfaceUsage{
		Name: s.Name, RxBytes: value(s.RxBytes), RxErrors: value(s.RxErrors), TxBytes: value(s.TxBytes), TxErrors: value(s.TxErrors),
	}
}
