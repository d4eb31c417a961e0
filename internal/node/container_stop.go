package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
)

var (
	failStopEffect   = failpoint.New("node.stop-container.effect")
	failStopCommit   = failpoint.New("node.stop-container.commit")
	failRemoveIntent = failpoint.New("node.remove-container.intent")
	failRemoveEffect = failpoint.New("node.remove-container.effect")
	failRemoveCommit = failpoint.New("node.remove-container.commit")
	failRetainEffect = failpoint.New("node.retain-attempt.effect")
)

// StopContainer asks a container to end and kills it if it still runs after the grace period (CRI StopContainer). It
// returns when the container is Stopped and its exit code is known. It succeeds for an unknown container.
func (n *Node) StopContainer(ctx context.Context, id string, grace time.Duration) error {
	p, id, err := n.orderContainer(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return p.stopContainer(ctx, id, p.keyOf(id), grace)
}

// stopContainer takes the container's slot and stops the container. A call with a shorter grace period cancels a stop
// that is under way. The cancelled call then waits for the slot again and finds the container stopped.
func (p *livePod) stopContainer(ctx context.Context, id, key string, grace time.Duration) error {
	if p.rec.Load().previous(id) != nil {
		return nil // a previous attempt has ended; the slot belongs to the newest attempt
	}
	if err := p.admits(id, StopContainer); err != nil {
		return err
	}
	killBy := time.Now().Add(grace)
	for {
		o := p.node.order(StopContainer)
		o.killBy, o.limit = killBy, time.Until(killBy)+o.limit
		err := p.slotOf(key).run(ctx, o, func(ctx context.Context) error {
			return p.endContainer(ctx, id, max(0, time.Until(killBy)))
		})
		if !errors.Is(err, errOverridden) || ctx.Err() != nil {
			return err
		}
	}
}

// endContainer implements StopContainer inside the container's slot.
func (p *livePod) endContainer(ctx context.Context, id string, grace time.Duration) error {
	rec, c, state, err := p.containerState(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	switch Decide(rec.unit, state, StopContainer) {
	case Idempotent:
		return nil
	case Refused:
		return refusal(rec.unit, id, state, StopContainer)
	}
	return p.stopAndCommit(ctx, rec, c, grace)
}

// stopAndCommit makes the backend stop the container and commits Stopped.
func (p *livePod) stopAndCommit(ctx context.Context, rec *Pod, c *Container, grace time.Duration) error {
	if err := p.stopInBackend(ctx, rec, c, grace); err != nil {
		return fmt.Errorf("stop container %s: %w", c.ID, err)
	}
	if err := failStopEffect.Hit(ctx); err != nil {
		return err
	}
	status, err := p.backendOf(c).Status(ctx, rec.sandboxPod(), c.sandboxContainer())
	if err != nil {
		return fmt.Errorf("status of container %s after its stop: %w", c.ID, err)
	}
	switch status.State {
	case sandbox.StateRunning:
		return fmt.Errorf("container %s still runs after its stop: %w", c.ID, errdefs.ErrInternal)
	case sandbox.StateAbsent:
		status = lostStatus("its backend does not know it")
	}
	if err := p.commitStopped(c.ID, status); err != nil {
		return err
	}
	p.tell(ctx, c.ID, p.node.Hooks.StopContainer)
	return failStopCommit.Hit(ctx)
}

// RemoveContainer removes a container (CRI RemoveContainer). It kills a running container first, except in a unit pod,
// where the state table forbids removing a running container. The container of a Killed unit pod is only hidden;
// RemoveSandbox removes it. Previous attempts can always be removed. RemoveContainer succeeds for an unknown
// container.
func (n *Node) RemoveContainer(ctx context.Context, id string) error {
	p, full, err := n.orderContainer(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if p.rec.Load().previous(full) != nil {
		return p.removePrevious(full) // only its record exists; the slot belongs to the newest attempt
	}
	if err := p.admits(full, RemoveContainer); err != nil {
		return err
	}
	if rec := p.rec.Load(); rec.unit && rec.State == Killed {
		return p.unlist(full)
	}
	err = p.slotOf(p.keyOf(full)).run(ctx, n.order(RemoveContainer), func(ctx context.Context) error {
		return p.removeContainer(ctx, full)
	})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// admits returns an error if the state table refuses a call. Callers check this before they wait for the slot, because
// an order that waits for the slot can already cancel the order under way.
func (p *livePod) admits(id string, call Call) error {
	rec, _, state, err := p.containerState(id)
	if err == nil && Decide(rec.unit, state, call) == Refused {
		return refusal(rec.unit, id, state, call)
	}
	return nil
}

// removeContainer implements RemoveContainer inside the container's slot.
func (p *livePod) removeContainer(ctx context.Context, id string) error {
	rec, c, state, err := p.containerState(id)
	if err != nil {
		return err
	}
	if state == Retained {
		return p.removePrevious(id)
	}
	switch Decide(rec.unit, state, RemoveContainer) {
	case Idempotent:
		return nil
	case Refused:
		return refusal(rec.unit, id, state, RemoveContainer)
	case Walk:
		if c.State == Starting || c.State == Running {
			if err := p.stopAndCommit(ctx, rec, c, 0); err != nil {
				return err
			}
		}
	}
	return p.removeStopped(ctx, id, RemoveContainer)
}

// removePrevious removes a previous attempt from the record.
func (p *livePod) removePrevious(id string) error {
	return p.commit(func(next *Pod) error {
		next.Previous = slices.DeleteFunc(next.Previous, func(c *Container) bool { return c.ID == id })
		return nil
	})
}

// removeStopped removes a container that is not running: it records the intent, removes the container from the backend
// and commits. With intentRetain, the container's record stays as a previous attempt.
func (p *livePod) removeStopped(ctx context.Context, id string, intent Call) error {
	if err := p.intend(func(next *Pod) error { next.find(id).Intent = intent; return nil }); err != nil {
		return err
	}
	if err := failRemoveIntent.Hit(ctx); err != nil {
		return err
	}
	if err := p.finishRemove(ctx, id); err != nil {
		p.node.wakeJanitor()
		return err
	}
	return failRemoveCommit.Hit(ctx)
}

// unlist hides the container of a Killed unit pod. It ended with its pod, and a kubelet removes containers before their
// sandbox.
func (p *livePod) unlist(id string) error {
	if c := p.rec.Load().find(id); c == nil || c.Unlisted {
		return nil
	}
	return p.commit(func(next *Pod) error {
		if c := next.find(id); c != nil {
			c.Unlisted = true
		}
		return nil
	})
}

// finishRemove completes the intent to remove a container or to retain it as a previous attempt.
func (p *livePod) finishRemove(ctx context.Context, id string) error {
	rec := p.rec.Load()
	c := rec.find(id)
	if c == nil {
		return nil
	}
	p.node.Hooks.RemoveContainer(ctx, rec, c)
	if err := p.removeInBackend(ctx, rec, c); err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	done := failRemoveEffect
	if c.Intent == intentRetain {
		done = failRetainEffect
	}
	if err := done.Hit(ctx); err != nil {
		return err
	}
	return p.commit(func(next *Pod) error {
		switch c := next.find(id); {
		case c.Intent == intentRetain:
			next.retain(c)
		case next.unit:
			c.State, c.Intent = Removed, ""
		default:
			next.drop(id)
		}
		return nil
	})
}
