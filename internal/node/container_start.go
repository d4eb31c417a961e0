package node

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
)

var (
	failStartIntent = failpoint.New("node.start-container.intent")
	failStartEffect = failpoint.New("node.start-container.effect")
	failStartCommit = failpoint.New("node.start-container.commit")
)

// StartContainer starts a created or stopped container (CRI StartContainer) and returns once it is Running. A container
// that cannot be started becomes Stopped, and its status says why. Errors: ErrNotFound, ErrFailedPrecondition, or the
// backend's own errors.
func (n *Node) StartContainer(ctx context.Context, id string) error {
	p, id, err := n.orderContainer(id)
	if err != nil {
		return err
	}
	key := p.keyOf(id)
	return p.slotOf(key).run(ctx, n.order(StartContainer), func(ctx context.Context) error {
		return p.startContainer(ctx, id)
	})
}

// startContainer implements StartContainer inside the container's slot.
func (p *livePod) startContainer(ctx context.Context, id string) error {
	rec, c, state, err := p.containerState(id)
	if err != nil {
		return err
	}
	switch Decide(rec.unit, state, StartContainer) {
	case Idempotent:
		return nil
	case Refused:
		return refusal(rec.unit, id, state, StartContainer)
	}
	// The state Starting serves as the recorded intent.
	err = p.intend(func(next *Pod) error {
		if err := next.acceptsWork(StartContainer); err != nil {
			return err
		}
		starting := next.find(id)
		if starting.Intent == RemoveContainer || starting.Intent == intentRetain {
			return fmt.Errorf("%s: container %s is being removed: %w", StartContainer, id, errdefs.ErrFailedPrecondition)
		}
		starting.State, starting.ExitCode, starting.Reason, starting.Message = Starting, 0, "", ""
		starting.StartedAt, starting.FinishedAt = time.Time{}, time.Time{}
		return nil
	})
	if err != nil {
		return err
	}
	err = p.node.attempt(StartContainer, func() error {
		if err := failStartIntent.Hit(ctx); err != nil {
			return err
		}
		if err := p.node.Hooks.StartContainer(ctx, rec, c); err != nil {
			return err
		}
		err := p.step(ctx, "backend.start-container", func(ctx context.Context) error {
			return p.backendOf(c).StartContainer(ctx, rec.sandboxPod(), c.sandboxContainer())
		})
		if err != nil {
			return err
		}
		return failStartEffect.Hit(ctx)
	})
	if err != nil {
		p.startFailed(ctx, rec, c, err)
		return err
	}
	if err := p.commitRunning(ctx, rec, c); err != nil {
		return err
	}
	p.tell(ctx, c.ID, p.node.Hooks.StartedContainer)
	return failStartCommit.Hit(ctx)
}

// commitRunning commits Running, and then Stopped if the container has ended in the meantime.
func (p *livePod) commitRunning(ctx context.Context, rec *Pod, c *Container) error {
	var status sandbox.Status
	err := p.commit(func(next *Pod) error {
		running := next.find(c.ID)
		if running.State != Starting {
			return nil // the sandbox was lost in the meantime, and the container with it
		}
		// Inside the transition, so that an end is either in this status or reported to a container that is Running.
		var err error
		if status, err = p.backendOf(c).Status(ctx, rec.sandboxPod(), c.sandboxContainer()); err != nil {
			p.node.log.Warn("cannot query a container that has just started", "container", c.ID, "err", err)
		}
		running.State, running.Pid, running.StartedAt = Running, status.Pid, status.StartedAt
		if running.StartedAt.IsZero() {
			running.StartedAt = time.Now()
		}
		return nil
	})
	if err != nil || status.State != sandbox.StateExited {
		return err
	}
	return p.commitStopped(c.ID, status)
}

// startFailed stops a container that failed to start and commits Stopped with the reason. If the container cannot be
// stopped, startFailed commits Running instead.
func (p *livePod) startFailed(ctx context.Context, rec *Pod, c *Container, cause error) {
	ctx, cancel := rollbackContext(ctx)
	defer cancel()
	if err := p.stopInBackend(ctx, rec, c, 0); err != nil {
		p.node.log.Warn("stop of a container that failed to start returned an error", "container", c.ID, "err", err)
	}
	status, err := p.backendOf(c).Status(ctx, rec.sandboxPod(), c.sandboxContainer())
	if err == nil && status.State == sandbox.StateRunning {
		p.node.log.Error("cannot stop a container that failed to start", "container", c.ID, "err", cause)
		if err := p.commitRunning(ctx, rec, c); err != nil {
			p.node.log.Error("cannot record that a container runs", "container", c.ID, "err", err)
		}
		return
	}
	if err != nil || status.State != sandbox.StateExited {
		status = sandbox.Status{ExitCode: sandbox.ExitStartError, Reason: sandbox.ReasonStartError}
	}
	if status.Message == "" {
		status.Message = cause.Error()
	}
	if err := p.commitStopped(c.ID, status); err != nil {
		p.node.log.Error("cannot record that a container failed to start", "container", c.ID, "err", err)
	}
}

// commitStopped commits Stopped for a container that was Starting or Running.
func (p *livePod) commitStopped(id string, status sandbox.Status) error {
	return p.observe(func(next *Pod) error {
		c := next.find(id)
		if c == nil || (c.State != Starting && c.State != Running) {
			return errUnchanged
		}
		c.finish(status)
		return nil
	})
}

// recordExit handles a backend's report that a container has ended. The report can be about an earlier run, and can have
// been delayed until the container runs again. So recordExit records what the backend says about the present run.
func (p *livePod) recordExit(id string, reported sandbox.Status) {
	err := p.observe(func(next *Pod) error {
		c := next.find(id)
		if c == nil || c.State != Running { // commitRunning looks for the end of a container that is Starting
			return errUnchanged
		}
		status, err := p.backendOf(c).Status(context.Background(), next.sandboxPod(), c.sandboxContainer())
		switch {
		case err == nil && status.State == sandbox.StateRunning:
			return errUnchanged
		case err != nil || status.State != sandbox.StateExited:
			status = reported // the backend has already forgotten the run
		}
		c.finish(status)
		return nil
	})
	if err != nil {
		p.node.log.Error("cannot record a container's exit", "container", id, "err", err)
	}
}

// containerState returns the pod's record, the container, and the container's state in the table. In a unit pod the
// container is nil in some states, but in those states the table allows no work on a container.
func (p *livePod) containerState(id string) (*Pod, *Container, State, error) {
	rec := p.rec.Load()
	if previous := rec.previous(id); previous != nil {
		return rec, previous, Retained, nil
	}
	c := rec.find(id)
	switch {
	case c != nil && c.State == "": // incomplete, and hidden
		return nil, nil, "", notFound("container", id)
	case rec.unit && rec.State != "":
		return rec, c, rec.UnitState(), nil
	case c == nil:
		return nil, nil, "", notFound("container", id)
	case rec.State == Killed:
		return rec, c, Killed, nil
	default:
		return rec, c, c.State, nil
	}
}

func (p *livePod) keyOf(id string) string {
	if c := p.rec.Load().find(id); c != nil {
		return c.key()
	}
	return ""
}

// lostStatus returns the status of a container whose exit was not observed.
func lostStatus(why string) sandbox.Status {
	return sandbox.Status{
		State: sandbox.StateExited, FinishedAt: time.Now(), ExitCode: sandbox.ExitUnknown,
		Reason: sandbox.ReasonUnknown, Message: fmt.Sprintf("its exit was not observed: %s", why),
	}
}
