package node

import (
	"context"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/sandbox"
)

const (
	// statsTimeout bounds what one sick pod can cost a list of figures.
	statsTimeout = 2 * time.Second
	// statsWorkers is how many pods are measured at a time.
	statsWorkers = 8
)

// ContainerStats measures a container. Errors: ErrNotFound, ErrNotImplemented, the backend's.
func (n *Node) ContainerStats(ctx context.Context, id string) (*runtimeapi.ContainerStats, error) {
	c, p, err := n.Container(id)
	if err != nil {
		return nil, err
	}
	return n.containerStats(ctx, p, c)
}

// ContainersStats measures many containers at once; those that cannot be measured are left out.
func (n *Node) ContainersStats(ctx context.Context, containers []*Container) []*runtimeapi.ContainerStats {
	return measure(ctx, containers, func(ctx context.Context, c *Container) (*runtimeapi.ContainerStats, error) {
		p, err := n.Pod(c.PodID)
		if err != nil {
			return nil, err
		}
		return n.containerStats(ctx, p, c)
	})
}

// PodStats measures a pod: its own figures, its network and its containers. Errors as for ContainerStats.
func (n *Node) PodStats(ctx context.Context, id string) (*runtimeapi.PodSandboxStats, error) {
	p, err := n.Pod(id)
	if err != nil {
		return nil, err
	}
	return n.podStats(ctx, p)
}

// PodsStats measures many pods at once; those that cannot be measured are left out.
func (n *Node) PodsStats(ctx context.Context, pods []*Pod) []*runtimeapi.PodSandboxStats {
	return measure(ctx, pods, n.podStats)
}

// measure asks for the figures of many things, a few at a time, and gives up on each after statsTimeout, so that one
// that hangs (a process in uninterruptible sleep, a silent machine) does not hold up the rest.
func measure[In, Out any](ctx context.Context, things []In, one func(context.Context, In) (Out, error)) []Out {
	type result struct {
		at    int
		value Out
	}
	var (
		wg      sync.WaitGroup
		queue   = make(chan int)
		results = make(chan result, len(things))
	)
	for range min(statsWorkers, len(things)) {
		wg.Go(func() {
			for i := range queue {
				if value, err := within(ctx, func(ctx context.Context) (Out, error) { return one(ctx, things[i]) }); err == nil {
					results <- result{i, value}
				}
			}
		})
	}
	for i := range things {
		queue <- i
	}
	close(queue)
	wg.Wait()
	close(results)
	ordered, got := make([]Out, len(things)), make([]bool, len(things))
	for r := range results {
		ordered[r.at], got[r.at] = r.value, true
	}
	out := make([]Out, 0, len(things))
	for i, ok := range got {
		if ok {
			out = append(out, ordered[i])
		}
	}
	return out
}

// within runs work and stops waiting for it after statsTimeout.
func within[Out any](ctx context.Context, work func(context.Context) (Out, error)) (Out, error) {
	type result struct {
		value Out
		err   error
	}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	done := make(chan result, 1)
	go func() {
		defer cancel()
		value, err := work(ctx)
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		select {
		case r := <-done: // cancel ran because work ended
			return r.value, r.err
		default:
		}
		var none Out
		return none, ctx.Err()
	}
}

func (n *Node) containerStats(ctx context.Context, p *Pod, c *Container) (*runtimeapi.ContainerStats, error) {
	provider, err := n.provider(p)
	if err != nil {
		return nil, err
	}
	stats, err := provider.ContainerStats(ctx, p.sandboxPod(), c.sandboxContainer())
	if err != nil {
		return nil, err
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
		return nil, unable(p, "figures")
	}
	if err := n.broken[p.Handler]; err != nil {
		return nil, unrecovered(p.Handler, err)
	}
	return provider, nil
}

// networkUsage reads the traffic of a pod's interfaces; eth0 is the default one.
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
