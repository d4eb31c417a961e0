package node

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/stats"
)

// PodSamples are the samples of a pod itself, which are those of its network, and of its running containers.
type PodSamples struct {
	ObjectSamples
	Containers []ObjectSamples
}

// ObjectSamples are the samples of a pod or a container.
type ObjectSamples struct {
	Owner stats.Owner
	// Time is when the samples were measured.
	Time    time.Time
	Samples stats.Samples
}

// Samples returns the samples of all ready pods, which may be as old as Config.StatsInterval. It omits what cannot be
// measured.
func (n *Node) Samples(ctx context.Context) []PodSamples {
	var ready []*Pod
	for _, p := range n.Pods() {
		if p.Ready() {
			ready = append(ready, p)
		}
	}
	return measure(ctx, n, ready, podID, n.podSamples)
}

func (n *Node) podSamples(ctx context.Context, p *Pod) (s PodSamples, err error) {
	meta := p.Config.GetMetadata()
	s.Owner = stats.Owner{Pod: meta.GetName(), Namespace: meta.GetNamespace(), ID: p.ID}
	s.Time = time.Now()
	if p.Netns != "" {
		interfaces, err := n.interfaces(ctx, p, recentSamples)
		if err != nil {
			return s, err
		}
		s.Samples = trafficSamples(interfaces)
	}
	for _, c := range p.Containers {
		if c.State != Running {
			continue
		}
		if of, err := n.containerSamples(ctx, p, c); err == nil {
			of.Owner.Pod, of.Owner.Namespace = s.Owner.Pod, s.Owner.Namespace
			s.Containers = append(s.Containers, of)
		}
	}
	return s, nil
}

func (n *Node) containerSamples(ctx context.Context, p *Pod, c *Container) (s ObjectSamples, err error) {
	f, err := n.containerFigures(ctx, p, c, recentSamples)
	if err != nil {
		return s, err
	}
	image := c.Config.GetImage()
	s.Owner = stats.Owner{Container: c.Config.GetMetadata().GetName(), ID: c.ID,
		Image: cmp.Or(image.GetUserSpecifiedImage(), image.GetImage())}
	s.Time = f.at
	s.Samples.Add(stats.LastSeen, float64(f.at.Unix()))
	s.Samples.Add(stats.StartTime, float64(c.StartedAt.Unix()))
	s.Samples.Spec(c.Config.GetLinux().GetResources())
	s.Samples = append(s.Samples, f.samples...)
	if !slices.ContainsFunc(s.Samples, func(s stats.Sample) bool { return s.Family == stats.Requests }) {
		s.Samples.Add(stats.Requests, 0) // a client takes a metric that is described and missing for a failure
	}
	return s, nil
}

func trafficSamples(interfaces []network.InterfaceStats) (s stats.Samples) {
	for _, i := range interfaces {
		s.Add(stats.NetworkRxBytes, float64(i.RxBytes), i.Name)
		s.Add(stats.NetworkRxPackets, float64(i.RxPackets), i.Name)
		s.Add(stats.NetworkRxDropped, float64(i.RxDropped), i.Name)
		s.Add(stats.NetworkRxErrors, float64(i.RxErrors), i.Name)
		s.Add(stats.NetworkTxBytes, float64(i.TxBytes), i.Name)
		s.Add(stats.NetworkTxPackets, float64(i.TxPackets), i.Name)
		s.Add(stats.NetworkTxDropped, float64(i.TxDropped), i.Name)
		s.Add(stats.NetworkTxErrors, float64(i.TxErrors), i.Name)
	}
	return s
}
