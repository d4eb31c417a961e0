package nri

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"

	"github.com/tripod-run/tripod/internal/node"
)

// subject is a pod or a container that plugins know: its first hook was called and its last was not. Plugins that
// connect later are synchronised with exactly these, so no plugin misses one or sees one twice. A subject also exists
// if no plugin was connected at that time.
type subject struct {
	// stopped means that the hook for its end was called.
	stopped bool
	// creating describes a container until it is made.
	creating *api.Container
}

// enter waits until no plugin is being called or synchronised. The caller must call leave.
//
// The library holds a lock from the list of pods until the new plugin is called for everything. BlockPluginSync takes
// it for reading, so it is the outer one of the two locks.
func (x *Plugins) enter(ctx context.Context) (leave func(), err error) {
	block := x.adaptation.BlockPluginSync()
	select {
	case x.turn <- struct{}{}:
		return func() { <-x.turn; block.Unblock() }, nil
	case <-ctx.Done():
		block.Unblock()
		return nil, fmt.Errorf("wait for node plugins (NRI): %w", context.Cause(ctx))
	}
}

// learn makes the pods and containers known that an earlier daemon made.
func (x *Plugins) learn(pods []*node.Pod) {
	for _, p := range pods {
		if p.State == "" {
			continue
		}
		x.known[p.ID] = &subject{stopped: p.State == node.Killed}
		for _, c := range p.Containers {
			if c.State != "" && c.State != node.Removed {
				x.known[c.ID] = &subject{stopped: c.State == node.Stopped}
			}
		}
	}
}

// synchronize gives new plugins all known pods and containers. The library calls it while no hook is being called. It
// applies the plugins' updates only later, because orders that wait for a hook hold the containers.
// Calls for pods wait meanwhile. The library disconnects a plugin that takes longer than Config.SynchronizationTimeout.
func (x *Plugins) synchronize(ctx context.Context, call adaptation.SyncCB) error {
	x.syncing.Store(true)
	pods, containers := x.snapshot()
	// The library has one bound for all answers and reads it when it calls a plugin. No other plugin is called meanwhile.
	adaptation.SetPluginRequestTimeout(x.cfg.SynchronizationTimeout)
	updates, err := call(ctx, pods, containers)
	adaptation.SetPluginRequestTimeout(x.cfg.RequestTimeout)
	if err != nil {
		x.syncing.Store(false)
		return err
	}
	if len(updates) > 0 {
		x.inBackground("updates after a synchronisation", func() { x.update(context.Background(), updates) })
	}
	return nil
}

func (x *Plugins) snapshot() ([]*api.PodSandbox, []*api.Container) {
	var pods []*api.PodSandbox
	var containers []*api.Container
	current := map[string]*subject{}
	for _, p := range x.node.Records() {
		s := x.known[p.ID]
		if s == nil {
			continue
		}
		s.stopped = s.stopped || p.State == node.Killed
		current[p.ID] = s
		pods = append(pods, podMessage(p))
		for _, c := range p.Containers {
			if s := x.known[c.ID]; s != nil {
				s.stopped = s.stopped || c.State == node.Stopped
				current[c.ID] = s
				containers = append(containers, x.describe(p, c, s))
			}
		}
	}
	x.known = current
	return pods, containers
}

// describe returns a container for plugins. A container that is being made has no specification that could be read.
func (x *Plugins) describe(p *node.Pod, c *node.Container, s *subject) *api.Container {
	switch {
	case s != nil && s.creating != nil:
		return s.creating
	case c.State == "":
		return containerMessage(c, nil)
	}
	spec, err := x.node.Spec(p, c)
	if err != nil && !errdefs.IsNotFound(err) { // it is being removed
		x.log.Warn("plugins do not get a container's specification", "container", c.ID, "err", err)
	}
	return containerMessage(c, spec)
}
