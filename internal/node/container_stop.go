package node

import (
	"context"
	"errors"
	"fmt"
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

// StopContainer asks a container to end and forces it after grace (CRI StopContainer). It returns when the container
// is Stopped with its exit code. An unknown container is a success.
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

// stopContainer takes the container's slot for a StopContainer. One with less grace overrides one under way, which
// then comes back here, waits, and finds the container stopped.
func (p *livePod) stopContainer(ctx context.Context, id, key string, grace time.Duration) error {
	if p.rec.Load().previous(id) != nil {
		return nil // it has ended, and the slot is the newest attempt's
	}
	if err := p.admits(id, StopContainer); err != nil {
		return err
	}
	by := time.Now().Add(grace)
	for {
		o := p.node.order(StopContainer)
		o.by, o.limit = by, time.Until(by)+o.limit
		err := p.slotOf(key).run(ctx, o, func(ctx context.Context) error {
			return p.endContainer(ctx, id, max(0, time.Until(by)))
		})
		if !errors.Is(err, errOverridden) || ctx.Err() != nil {
			return err
		}
	}
}

// endContainer is StopContainer in the container's slot.
func (p *livePod) endContainer(ctx context.Context, id string, grace time.Duration) error {
	rec, c, state, err := p.seen(id)
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
	return p.bringToEnd(ctx, rec, c, grace)
}

// bringToEnd has the backend end the container and commits Stopped.
func (p *livePod) bringToEnd(ctx context.Context, rec *Pod, c *Container, grace time.Duration) error {
	if err := p.backend.StopContainer(ctx, rec.sandboxPod(), c.sandboxContainer(), grace); err != nil {
		return fmt.Errorf("stop container %s: %w", c.ID, err)
	}
	if err := failStopEffect.Hit(ctx); err != nil {
		return err
	}
	status, err := p.backend.Status(ctx, rec.sandboxPod(), c.sandboxContainer())
	if err != nil {
		return fmt.Errorf("status of container %s after its stop: %w", c.ID, err)
	}
	switch status.State {
	case sandbox.StateRunning:
		return fmt.Errorf("container %s still runs after its stop: %w", c.ID, errdefs.ErrInternal)
	case sandbox.StateAbsent:
		status = lostStatus("its backend knows nothing of it")
	}
	if err := p.stopped(c.ID, status); err != nil {
		return err
	}
	return failStopCommit.Hit(ctx)
}

// RemoveContainer removes a container (CRI RemoveContainer). In a pod of many a running one is killed first; for a
// unit pod the table of seed 1 holds: the container of a Killed one goes with it, and is listed no more once its
// removal was asked for. Previous attempts can always be removed. An unknown container is a success.
func (n *Node) RemoveContainer(ctx context.Context, id string) error {
	p, full, err := n.orderContainer(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if p.rec.Load().previous(full) != nil {
		return p.removePrevious(full) // nothing of it is there, and the slot is the newest attempt's
	}
	if err := p.admits(full, RemoveContainer); err != nil {
		return errors.Join(err, p.unlist(full))
	}
	err = p.slotOf(p.keyOf(full)).run(ctx, n.order(RemoveContainer), func(ctx context.Context) error {
		return p.removeContainer(ctx, full)
	})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// admits refuses, by the table, an order that would otherwise override the one under way.
func (p *livePod) admits(id string, call Call) error {
	rec, _, state, err := p.seen(id)
	if err == nil && Decide(rec.unit, state, call) == Refused {
		return refusal(rec.unit, id, state, call)
	}
	return nil
}

// removeContainer is RemoveContainer in the container's slot.
func (p *livePod) removeContainer(ctx context.Context, id string) error {
	rec, c, state, err := p.seen(id)
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
			if err := p.bringToEnd(ctx, rec, c, 0); err != nil {
				return err
			}
		}
	}
	return p.takeAway(ctx, id, RemoveContainer)
}

// removePrevious takes a previous attempt out of the record.
func (p *livePod) removePrevious(id string) error {
	return p.commit(func(next *Pod) error { next.dropPrevious(id); return nil })
}

// takeAway removes a container that does not run: intent, the backend's part, commit. With intentRetain its record stays,
// as that of a previous attempt.
func (p *livePod) takeAway(ctx context.Context, id string, intent Call) error {
	if err := p.commit(func(next *Pod) error { next.find(id).Intent = intent; return nil }); err != nil {
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

// unlist takes the container of a Killed unit pod out of the lists. A kubelet's garbage collection removes containers
// before their sandbox, and a sandbox only when it sees no containers of it; by the table it could do neither.
func (p *livePod) unlist(id string) error {
	killed := func(rec *Pod) *Container {
		if !rec.unit || rec.State != Killed {
			return nil
		}
		return rec.find(id)
	}
	if c := killed(p.rec.Load()); c == nil || c.Unlisted {
		return nil
	}
	return p.commit(func(next *Pod) error {
		if c := killed(next); c != nil {
			c.Unlisted = true
		}
		return nil
	})
}

// finishRemove carries the intent to remove a container, or to retain it as a previous attempt, to its end.
func (p *livePod) finishRemove(ctx context.Context, id string) error {
	rec := p.rec.Load()
	c := rec.find(id)
	if c == nil {
		return nil
	}
	if err := p.backend.RemoveContainer(ctx, rec.sandboxPod(), c.sandboxContainer()); err != nil {
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
