package nri

import (
	"context"

	"github.com/containerd/nri/pkg/api"

	"github.com/tripod-run/tripod/internal/guard"
)

// updateUnsolicited changes the resources of containers because a plugin wants it, and returns the updates that failed.
func (x *Plugins) updateUnsolicited(ctx context.Context, updates []*api.ContainerUpdate) (failed []*api.ContainerUpdate, err error) {
	err = guard.Call(x.log, "updates by a plugin", func() error { failed = x.update(ctx, updates); return nil })
	return failed, err
}

// update changes the resources of containers. Each update waits no longer for its container than a plugin may take for
// an answer, because the order that holds the container may itself wait for a plugin.
func (x *Plugins) update(ctx context.Context, updates []*api.ContainerUpdate) (failed []*api.ContainerUpdate) {
	for _, u := range updates {
		if u == nil {
			continue
		}
		if err := x.updateOne(ctx, u); err != nil {
			x.log.Warn("cannot update a container for a plugin", "container", u.GetContainerId(), "err", err)
			if !u.GetIgnoreFailure() {
				failed = append(failed, u)
			}
		}
	}
	return failed
}

func (x *Plugins) updateOne(ctx context.Context, u *api.ContainerUpdate) error {
	change, rest := split(u.GetLinux().GetResources())
	if err := none("linux.resources", rest); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, x.cfg.RequestTimeout)
	defer cancel()
	return x.node.UpdateForPlugin(ctx, u.GetContainerId(), change)
}

// evict kills containers because a plugin wants it. It does not wait for their ends: the order that a plugin answered
// holds a container itself.
func (x *Plugins) evict(evictions []*api.ContainerEviction) {
	for _, e := range evictions {
		x.inBackground("eviction by a plugin", func() {
			err := x.node.StopContainer(context.Background(), e.GetContainerId(), 0)
			x.log.Info("a plugin evicted a container", "container", e.GetContainerId(), "reason", e.GetReason(), "err", err)
		})
	}
}
