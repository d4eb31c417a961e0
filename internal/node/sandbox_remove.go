package node

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
)

var (
	failRemoveSandboxIntent     = failpoint.New("node.remove-sandbox.intent")
	failRemoveSandboxContainers = failpoint.New("node.remove-sandbox.containers")
	failRemoveSandboxEffect     = failpoint.New("node.remove-sandbox.effect")
	failRemoveSandboxCommit     = failpoint.New("node.remove-sandbox.commit")
)

// RemoveSandbox removes a pod and its containers (CRI RemovePodSandbox), and stops the pod first if necessary. It
// succeeds for an unknown pod.
func (n *Node) RemoveSandbox(ctx context.Context, id string) error {
	p, err := n.orderPod(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return ignoreGone(p.slot.run(ctx, n.order(RemovePodSandbox), p.removeSandbox))
}

// removeSandbox implements RemovePodSandbox inside the pod's slot.
func (p *livePod) removeSandbox(ctx context.Context) error {
	if err := p.stopSandbox(ctx); err != nil {
		return err
	}
	if p.isGone() { // the pod was incomplete, and the stop rolled it back
		return nil
	}
	if err := p.removeKilled(ctx); err != nil {
		p.node.wakeJanitor()
		return err
	}
	return nil
}

// removeKilled removes a Killed pod with its containers and its record.
func (p *livePod) removeKilled(ctx context.Context) error {
	if err := p.intend(func(next *Pod) error { next.Intent = RemovePodSandbox; return nil }); err != nil {
		return err
	}
	if err := failRemoveSandboxIntent.Hit(ctx); err != nil {
		return err
	}
	rec := p.rec.Load()
	if err := p.eachContainer(func(c *Container) error {
		return p.slotOf(c.key()).run(ctx, p.node.order(RemoveContainer), func(ctx context.Context) error {
			p.node.Hooks.RemoveContainer(ctx, rec, c)
			return p.removeInBackend(ctx, rec, c)
		})
	}); err != nil {
		return fmt.Errorf("remove the containers of pod %s: %w", p.id, err)
	}
	if err := failRemoveSandboxContainers.Hit(ctx); err != nil {
		return err
	}
	p.node.Hooks.RemovePod(ctx, rec)
	if err := p.removeSandboxInBackend(ctx, rec); err != nil {
		return err
	}
	if err := failRemoveSandboxEffect.Hit(ctx); err != nil {
		return err
	}
	if err := p.forget(); err != nil {
		return err
	}
	return failRemoveSandboxCommit.Hit(ctx)
}
