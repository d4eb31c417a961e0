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
	// drainTime bounds the wait for the last of a machine's output to be in the log.
	drainTime = 10 * time.Second
	// pressAgain is how long a guest may take to notice the power button before it is pressed again: one whose kernel was
	// not up yet has missed it.
	pressAgain = time.Second
)

// handle is one container of the ledger.
type handle = ledger.Handle[state, life]

// life is one run of a machine, from before its start to the record of its end.
type life struct {
	pod       *sandbox.Pod
	container *sandbox.Container
	console   *console.Console
	agent     atomic.Pointer[agent.Agent]
	qga       *agent.QGA
	// claimed is set by the first to report the end; ended is closed when that is in the handle's state and on the disk.
	claimed atomic.Bool
	ended   chan struct{}
	// oomKills is oomKills of the cgroup before the start.
	oomKills uint64
	// failed is set by a start that failed before it kills the machine, for the first to report the end.
	failed atomic.Pointer[failedStart]
}

// failedStart is the end of a start that failed; only its caller learns of it.
type failedStart struct {
	end machine.State
	// undone: the container is as it was created.
	undone bool
}

// close releases the machine's sockets and its log.
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

// machineEnded takes the driver's event that a machine has ended. It does not wait for the log.
func (b *Backend) machineEnded(e machine.Event) {
	h := b.ledger.Loaded(e.Name)
	if h == nil {
		return
	}
	s, l := h.Snapshot()
	if l == nil || !e.State.StartedAt.IsZero() && e.State.StartedAt.Equal(s.Former) {
		return // of a run that is over already
	}
	b.tasks.Go(guard.Func(b.log, "end of a machine", func() { b.finish(h, l, e.State) }))
}

// finish records the end of a life and reports it, once: the first to report the end decides how it was. It returns when that is
// done, whoever does it.
func (b *Backend) finish(h *handle, l *life, end machine.State) {
	if status, ok := b.record(h, l, end); ok {
		b.ledger.Report(sandbox.Event{PodID: h.PodID, ContainerID: h.ID, Status: status})
	}
}

// record puts the end of a life into the handle and on the disk once its log is complete, unless that has been done. It reports
// whether the node must hear of it.
func (b *Backend) record(h *handle, l *life, end machine.State) (sandbox.Status, bool) {
	if !l.claimed.CompareAndSwap(false, true) {
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

// drain waits until all that the machine has said is in the log, and closes its console.
func (b *Backend) drain(id string, l *life) {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	if err := l.console.Drain(ctx); err != nil {
		b.log.Error("the log of a machine that has ended is not complete", "container", id, "err", err)
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

// askToEnd presses the power button and waits for the end, for grace at most.
func (b *Backend) askToEnd(ctx context.Context, id string, l *life, grace time.Duration) error {
	over := time.NewTimer(grace)
	defer over.Stop()
	again := time.NewTicker(pressAgain)
	defer again.Stop()
	for first := true; ; first = false {
		if err := b.cfg.Driver.Shutdown(ctx, id); err != nil && ctx.Err() == nil {
			b.log.Warn("press the power button", "container", id, "err", err)
		}
		if first {
			if err := fpPressed.Hit(ctx); err != nil {
				return err
			}
		}
		select {
		case <-l.ended:
			return nil
		case <-over.C:
			return nil
		case <-again.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of container %s: %w", id, context.Cause(ctx))
		}
	}
}

// force kills what still runs of a life and returns when its end is recorded.
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
		end = machine.State{Cause: machine.CauseKilled, ExitCode: sandbox.ExitKilled, Message: "it was killed"}
	}
	b.finish(h, l, end)
	return nil
}

// RemoveContainer implements sandbox.Backend.
func (b *Backend) RemoveContainer(ctx context.Context, _ *sandbox.Pod, c *sandbox.Container) error {
	return b.removeContainer(ctx, c.ID)
}

// removeContainer removes what there is of a container, known or not.
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
		return fmt.Errorf("forget the machine of container %s: %w", id, err)
	}
	if err := fpUndefined.Hit(ctx); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(b.cfg.diskDir(id)), os.RemoveAll(b.cfg.machineDir(id)), b.removeSerialDir(id)); err != nil {
		return err
	}
	if err := b.cfg.Images.CloseDisk(ctx, id); err != nil {
		return fmt.Errorf("let go of the image of container %s: %w", id, err)
	}
	if err := b.ledger.Remove(id, id); err != nil {
		return err
	}
	b.sampler.Forget(id)
	return fpRemoved.Hit(ctx)
}
