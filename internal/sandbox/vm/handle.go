package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/console"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var (
	fpPressed   = failpoint.New("vm.stop-container.pressed")
	fpStopped   = failpoint.New("vm.stop-container.stopped")
	fpUndefined = failpoint.New("vm.remove-container.undefined")
	fpRemoved   = failpoint.New("vm.remove-container.removed")
)

const (
	// drainTime bounds the wait for a machine's last output to reach the log.
	drainTime = 10 * time.Second
	// pressInterval is the time between presses of the power button. One press is not enough, because a guest whose
	// kernel is not up yet misses it.
	pressInterval = time.Second
)

// handle is one container in the ledger.
type handle = ledger.Handle[state, life]

// life is one run of a machine. It begins before the machine is started, and ends when the machine's end is recorded.
type life struct {
	pod       *sandbox.Pod
	container *sandbox.Container
	console   *console.Console
	agent     atomic.Pointer[agent.Agent]
	qga       *agent.QGA
	// recording is set by the first call to record. The channel ended is closed once the end of the run is in the
	// handle's state and on disk.
	recording atomic.Bool
	ended     chan struct{}
	// oomKills is the cgroup's count of OOM kills before the start.
	oomKills uint64
	// failed describes a failed start. It is set before the machine is killed, so that record uses this description
	// instead of the driver's event.
	failed atomic.Pointer[failedStart]
}

// failedStart describes how a failed start ended. Only the caller of StartContainer learns about the failure; no event
// is reported.
type failedStart struct {
	end machine.State
	// undone means that the container returns to the state Created.
	undone bool
}

// close closes the machine's sockets and log.
func (l *life) close() {
	if a := l.agent.Load(); a != nil {
		a.Close()
	}
	l.console.Close()
}

// Status implements sandbox.Backend.
func (b *Backend) Status(_ context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	return b.ledger.Status(p.ID, c.ID)
}

// machineEnded handles the driver's event that a machine has ended. It returns before the log is complete.
func (b *Backend) machineEnded(e machine.Event) {
	h := b.ledger.Loaded(e.Name)
	if h == nil {
		return
	}
	s, l := h.Snapshot()
	if l == nil || !e.State.StartedAt.IsZero() && e.State.StartedAt.Equal(s.PreviousStart) {
		return // the event is about an earlier run
	}
	b.tasks.Go(guard.Func(b.log, "end of a machine", func() { b.finish(h, l, e.State) }))
}

// finish records the end of a run and then reports it. If another call is already doing so, finish only waits until the
// end is recorded. The first call decides how the run ended.
func (b *Backend) finish(h *handle, l *life, end machine.State) {
	if status, ok := b.record(h, l, end); ok {
		b.ledger.Report(sandbox.Event{PodID: h.PodID, ContainerID: h.ID, Status: status})
	}
}

// record waits until the log is complete, and then writes the end of a run to the handle and to disk. record returns
// the new status, and whether to report an event. If another call is already doing this, record only waits until that
// call is done, and returns false.
func (b *Backend) record(h *handle, l *life, end machine.State) (sandbox.Status, bool) {
	if !l.recording.CompareAndSwap(false, true) {
		<-l.ended
		return sandbox.Status{}, false
	}
	b.drain(h.ID, l)
	failed := l.failed.Load()
	status, _ := h.End(l, func(s *state) {
		if failed != nil {
			end = failed.end
		} else if s.NoBoot != "" {
			end.Cause, end.Message = machine.CauseNoBoot, s.NoBoot
		} else if end.Cause == machine.CauseOOM {
			end.Message += ": " + b.outOfMemory(l.pod, s.Definition.Memory)
		}
		s.end(end)
		if failed != nil && failed.undone {
			s.Phase = ledger.Created
		}
	})
	close(l.ended)
	return status, failed == nil
}

// drain waits until all of the machine's output is in the log, and then closes the machine's sockets and log.
func (b *Backend) drain(id string, l *life) {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	if err := l.console.Drain(ctx); err != nil {
		b.log.Error("the log of an ended machine is incomplete", "container", id, "err", err)
	}
	l.close()
}

// StopContainer implements sandbox.Backend.
func (b *Backend) StopContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, grace time.Duration) error {
	h, l, err := b.ledger.FindRun(p.ID, c.ID)
	if l == nil {
		return err
	}
	if grace > 0 {
		if err := b.askToEnd(ctx, h.ID, l, grace); err != nil {
			return err
		}
	}
	if err := b.force(ctx, h, l); err != nil {
		return err
	}
	return fpStopped.Hit(ctx)
}

// askToEnd presses the power button, repeatedly, until the machine ends or the grace period is over.
func (b *Backend) askToEnd(ctx context.Context, id string, l *life, grace time.Duration) error {
	over := time.NewTimer(grace)
	defer over.Stop()
	again := time.NewTicker(pressInterval)
	defer again.Stop()
	for first := true; ; first = false {
		failure := b.cfg.Driver.Shutdown(ctx, id)
		if first {
			if err := fpPressed.Hit(ctx); err != nil {
				return err
			}
		}
		graceOver := false
		select {
		case <-l.ended: // perhaps before its button was pressed
			return nil
		case <-over.C:
			graceOver = true
		case <-again.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of container %s: %w", id, context.Cause(ctx))
		}
		if failure != nil {
			b.log.Warn("cannot press the power button", "container", id, "err", failure)
		}
		if graceOver {
			return nil
		}
	}
}

// force kills the machine, if it still runs, and returns when the machine's end is recorded.
func (b *Backend) force(ctx context.Context, h *handle, l *life) error {
	select {
	case <-l.ended:
		return nil
	default:
	}
	if err := b.cfg.Driver.Destroy(ctx, h.ID); err != nil {
		return fmt.Errorf("kill the machine of container %s: %w", h.ID, err)
	}
	end, err := b.cfg.Driver.State(ctx, h.ID)
	if err != nil || end.Phase != machine.Ended {
		end = machine.State{Cause: machine.CauseKilled, ExitCode: sandbox.ExitKilled, Message: "the machine was killed"}
	}
	b.finish(h, l, end)
	return nil
}

// RemoveContainer implements sandbox.Backend.
func (b *Backend) RemoveContainer(ctx context.Context, _ *sandbox.Pod, c *sandbox.Container) error {
	return b.removeContainer(ctx, c.ID)
}

// removeContainer removes every trace of a container, even if it has no state file.
func (b *Backend) removeContainer(ctx context.Context, id string) error {
	h, err := b.ledger.Find(id, id)
	if err != nil {
		return err
	}
	if h != nil {
		if _, l := h.Snapshot(); l != nil {
			if err := b.force(ctx, h, l); err != nil {
				return err
			}
		}
	}
	if err := b.cfg.Driver.Undefine(ctx, id); err != nil {
		return fmt.Errorf("remove the machine of container %s: %w", id, err)
	}
	if err := fpUndefined.Hit(ctx); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(b.cfg.diskDir(id)), os.RemoveAll(b.cfg.machineDir(id)),
		console.RemoveDir(b.cfg.serialDir(id))); err != nil {
		return err
	}
	if err := b.cfg.Images.CloseDisk(ctx, id); err != nil {
		return fmt.Errorf("release the image of container %s: %w", id, err)
	}
	if err := b.ledger.Remove(id, id); err != nil {
		return err
	}
	b.sampler.Forget(id)
	return fpRemoved.Hit(ctx)
}
