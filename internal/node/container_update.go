package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
)

var (
	failUpdateIntent = failpoint.New("node.update-container.intent")
	failUpdateEffect = failpoint.New("node.update-container.effect")
)

// UpdateContainer changes the resources of a created or running container (CRI UpdateContainerResources). Unset fields
// keep their values. Errors: ErrNotFound, ErrFailedPrecondition, ErrNotImplemented, or the backend's own errors.
func (n *Node) UpdateContainer(ctx context.Context, id string, res *runtimeapi.LinuxContainerResources) error {
	return n.updateResources(ctx, id, res, false)
}

// UpdateForPlugin is UpdateContainer for a plugin: it calls no plugins, and a repeated CreateContainer need not know the
// change.
func (n *Node) UpdateForPlugin(ctx context.Context, id string, res *runtimeapi.LinuxContainerResources) error {
	return n.updateResources(ctx, id, res, true)
}

func (n *Node) updateResources(ctx context.Context, id string, res *runtimeapi.LinuxContainerResources, byPlugin bool) error {
	p, id, err := n.orderContainer(id)
	if err != nil {
		return err
	}
	return p.slotOf(p.keyOf(id)).run(ctx, n.order(intentUpdate), func(ctx context.Context) error {
		return p.updateContainer(ctx, id, res, byPlugin)
	})
}

// updateContainer records the new resources and applies them. If the backend cannot apply all of them, updateContainer
// restores the old resources.
func (p *livePod) updateContainer(ctx context.Context, id string, asked *runtimeapi.LinuxContainerResources, byPlugin bool) error {
	rec, old, state, err := p.containerState(id)
	if err != nil {
		return err
	}
	if state != Created && state != Running {
		return fmt.Errorf("%s: container %s is %s; only created and running ones can be changed: %w", intentUpdate, id, state,
			errdefs.ErrFailedPrecondition)
	}
	updater, ok := p.backendOf(old).(sandbox.Updater)
	if !ok {
		return fmt.Errorf("resources of a %q container cannot be changed in place: %w", rec.handlerOf(old), errdefs.ErrNotImplemented)
	}
	hooks := p.node.Hooks
	if byPlugin {
		hooks = noHooks{}
	}
	res, err := hooks.UpdateContainer(ctx, rec, old, asked)
	if err != nil {
		return err
	}
	config, request := withResources(old.Config, res), old.requested()
	if !byPlugin {
		request = withResources(request, asked)
	}
	if proto.Equal(request, config) {
		request = nil
	}
	wanted := &Container{ID: id, Config: config, ImageID: old.ImageID, Adjustment: old.Adjustment}
	if err := p.backendOf(old).Validate(rec.sandboxPod(), wanted.sandboxContainer()); err != nil {
		return err
	}
	err = p.commit(func(next *Pod) error {
		c := next.find(id)
		c.Config, c.Request, c.Intent = config, request, intentUpdate
		return nil
	})
	if err != nil {
		return err
	}
	err = p.node.attempt(intentUpdate, func() error {
		if err := failUpdateIntent.Hit(ctx); err != nil {
			return err
		}
		return p.applyUpdate(ctx, updater, id)
	})
	if err == nil {
		p.tell(ctx, id, hooks.UpdatedContainer)
		return nil
	}
	overridden := errors.Is(context.Cause(ctx), errOverridden)
	undone := p.commit(func(next *Pod) error {
		c := next.find(id)
		c.Config, c.Request = old.Config, old.Request
		return nil
	})
	if undone != nil {
		return errors.Join(err, undone)
	}
	if !overridden { // some of the new limits may be in force
		ctx, cancel := rollbackContext(ctx)
		defer cancel()
		if restored := p.applyUpdate(ctx, updater, id); restored != nil {
			p.node.log.Error("cannot restore a container's resources", "container", id, "err", restored)
		}
	}
	return errors.Join(err, p.commit(func(next *Pod) error { next.find(id).Intent = ""; return nil }))
}

// applyUpdate applies the recorded resources and clears the intent.
func (p *livePod) applyUpdate(ctx context.Context, updater sandbox.Updater, id string) error {
	rec := p.rec.Load()
	c := rec.find(id)
	if c == nil {
		return nil
	}
	if c.State == Created || c.State == Running {
		if err := updater.UpdateContainer(ctx, rec.sandboxPod(), c.sandboxContainer()); err != nil {
			return err
		}
	}
	if err := failUpdateEffect.Hit(ctx); err != nil {
		return err
	}
	return p.commit(func(next *Pod) error { next.find(id).Intent = ""; return nil })
}

// withResources returns a copy of the configuration with changed resources.
func withResources(config *runtimeapi.ContainerConfig, change *runtimeapi.LinuxContainerResources) *runtimeapi.ContainerConfig {
	config = proto.CloneOf(config)
	if config.Linux == nil {
		config.Linux = &runtimeapi.LinuxContainerConfig{}
	}
	config.Linux.Resources = MergeResources(config.Linux.Resources, change)
	return config
}

// MergeResources returns the old resources, overwritten by all non-zero fields of the change. (In the CRI, a zero or
// empty field means no change.) Unified limits are merged by key, and huge page limits by page size.
func MergeResources(old, change *runtimeapi.LinuxContainerResources) *runtimeapi.LinuxContainerResources {
	merged := &runtimeapi.LinuxContainerResources{}
	proto.Merge(merged, old)
	for _, limit := range change.GetHugepageLimits() {
		merged.HugepageLimits = slices.DeleteFunc(merged.HugepageLimits, func(l *runtimeapi.HugepageLimit) bool {
			return l.GetPageSize() == limit.GetPageSize()
		})
	}
	proto.Merge(merged, change)
	if change.GetMemoryLimitInBytes() != 0 && change.GetMemorySwapLimitInBytes() == 0 {
		merged.MemorySwapLimitInBytes = movedSwapLimit(old, merged.MemoryLimitInBytes)
	}
	return merged
}

// movedSwapLimit returns the limit on memory and swap together that leaves a container the same amount of swap when its
// memory limit changes. Without that, a limit on both could end up below the new memory limit.
func movedSwapLimit(old *runtimeapi.LinuxContainerResources, memory int64) int64 {
	both := old.GetMemorySwapLimitInBytes()
	switch {
	case both <= 0:
		return both
	case memory < 0:
		return -1
	default:
		return memory + max(both-old.GetMemoryLimitInBytes(), 0)
	}
}
