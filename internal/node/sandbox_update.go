package node

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
)

var (
	failResizeIntent = failpoint.New("node.update-sandbox.intent")
	failResizeEffect = failpoint.New("node.update-sandbox.effect")
)

// UpdateSandbox changes the resources and the overhead of a whole pod (CRI UpdatePodSandboxResources). Unset fields keep
// their values. The new values are recorded, and applied where the pod's limits are ours to set: on the pod's own cgroup
// and, in a unit pod, on a container that has no limits of its own. A caller that names a cgroup parent, such as the
// kubelet, limits that parent itself. Errors: ErrNotFound, ErrFailedPrecondition, or the backend's own errors.
func (n *Node) UpdateSandbox(ctx context.Context, id string, res, overhead *runtimeapi.LinuxContainerResources) error {
	p, err := n.orderPod(id)
	if err != nil {
		return err
	}
	return p.slot.run(ctx, n.order(intentResize), func(ctx context.Context) error {
		return p.updateSandbox(ctx, res, overhead)
	})
}

// updateSandbox implements UpdateSandbox inside the pod's slot. If the backend cannot apply the new resources,
// updateSandbox restores the old ones, or records that only the memory has not changed.
func (p *livePod) updateSandbox(ctx context.Context, res, overhead *runtimeapi.LinuxContainerResources) error {
	rec := p.rec.Load()
	if p.isGone() || rec.State == "" {
		return errPodGone
	}
	if err := rec.acceptsWork(intentResize); err != nil {
		return err
	}
	config := proto.CloneOf(rec.Config)
	if config.Linux == nil {
		config.Linux = &runtimeapi.LinuxPodSandboxConfig{}
	}
	config.Linux.Resources = MergeResources(config.Linux.Resources, res)
	config.Linux.Overhead = MergeResources(config.Linux.Overhead, overhead)
	if err := p.validateResize(rec, config); err != nil {
		return err
	}
	if err := p.node.Hooks.UpdatePod(ctx, rec, config.Linux.Overhead, config.Linux.Resources); err != nil {
		return err
	}
	err := p.commit(func(next *Pod) error {
		next.Config, next.Resizing = config, true
		return next.acceptsWork(intentResize)
	})
	if err != nil {
		return err
	}
	err = p.node.attempt(intentResize, func() error {
		if err := failResizeIntent.Hit(ctx); err != nil {
			return err
		}
		return p.applyResize(ctx)
	})
	if err == nil {
		p.node.Hooks.UpdatedPod(ctx, p.rec.Load())
		return nil
	}
	if errors.Is(err, sandbox.ErrMemoryKept) {
		kept := p.commit(func(next *Pod) error {
			next.Config, next.Resizing = withMemoryOf(config, rec.Config), false
			return nil
		})
		p.node.Hooks.UpdatedPod(ctx, p.rec.Load())
		return errors.Join(err, kept)
	}
	overridden := errors.Is(context.Cause(ctx), errOverridden)
	if undone := p.commit(func(next *Pod) error { next.Config = rec.Config; return nil }); undone != nil {
		return errors.Join(err, undone)
	}
	if !overridden { // some of the new limits may be in force
		ctx, cancel := rollbackContext(ctx)
		defer cancel()
		if restored := p.applyResize(ctx); restored != nil {
			p.node.log.Error("cannot restore a pod's resources", "pod", p.id, "err", restored)
		}
	}
	return errors.Join(err, p.commit(func(next *Pod) error { next.Resizing = false; return nil }))
}

// withMemoryOf returns a copy of the configuration with the memory limits of an earlier one.
func withMemoryOf(config, old *runtimeapi.PodSandboxConfig) *runtimeapi.PodSandboxConfig {
	config = proto.CloneOf(config)
	res, was := config.Linux.Resources, old.GetLinux().GetResources()
	res.MemoryLimitInBytes, res.MemorySwapLimitInBytes = was.GetMemoryLimitInBytes(), was.GetMemorySwapLimitInBytes()
	return config
}

// validateResize checks the pod and its containers with the pod's new configuration.
func (p *livePod) validateResize(rec *Pod, config *runtimeapi.PodSandboxConfig) error {
	wanted := rec.clone()
	wanted.Config = config
	if err := p.backend.Validate(wanted.sandboxPod(), nil); err != nil || !rec.unit {
		return err
	}
	for _, c := range wanted.present() {
		if err := p.backend.Validate(wanted.sandboxPod(), c.sandboxContainer()); err != nil {
			return err
		}
	}
	return nil
}

// applyResize applies the pod's recorded resources and clears Resizing.
func (p *livePod) applyResize(ctx context.Context) error {
	rec := p.rec.Load()
	if updater, ok := p.backend.(sandbox.PodUpdater); ok && rec.State == Initiated {
		if err := updater.UpdateSandbox(ctx, rec.sandboxPod()); err != nil {
			return err
		}
	}
	if updater, ok := p.backend.(sandbox.Updater); ok && rec.unit && rec.State == Initiated {
		for _, c := range rec.present() {
			err := p.slotOf(c.key()).run(ctx, p.node.order(intentUpdate),
				func(ctx context.Context) error { return p.updateUnit(ctx, updater, c.ID) })
			if err != nil {
				return fmt.Errorf("container %s: %w", c.ID, err)
			}
		}
	}
	if err := failResizeEffect.Hit(ctx); err != nil {
		return err
	}
	return p.commit(func(next *Pod) error { next.Resizing = false; return nil })
}

// updateUnit applies the pod's resources to the container of a unit pod.
func (p *livePod) updateUnit(ctx context.Context, updater sandbox.Updater, id string) error {
	rec := p.rec.Load()
	c := rec.find(id)
	if c == nil || c.State != Created && c.State != Running {
		return nil
	}
	return updater.UpdateContainer(ctx, rec.sandboxPod(), c.sandboxContainer())
}

// settleResize applies a pod's recorded resources after a restart. If the backend rejects them permanently, the record
// still keeps them, because no caller was told that the update failed.
func (p *livePod) settleResize(ctx context.Context) error {
	err := p.applyResize(ctx)
	if !rejected(err) {
		return err
	}
	p.node.log.Error("the backend rejects a pod's resources that were requested before the restart", "pod", p.id, "err", err)
	return p.commit(func(next *Pod) error { next.Resizing = false; return nil })
}

// rejected reports whether a repetition of an update cannot succeed.
func rejected(err error) bool {
	return errdefs.IsInvalidArgument(err) || errdefs.IsFailedPrecondition(err) || errdefs.IsNotImplemented(err) || errdefs.IsNotFound(err)
}
