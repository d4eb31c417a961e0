package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/vm/agent"
	"github.com/tripod-run/tripod/internal/vm/console"
	"github.com/tripod-run/tripod/internal/vm/machine"
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

// handle is one container: what its file says, and its present life if it runs.
type handle struct {
	id string

	mu    sync.Mutex
	state state
	life  *life
}

// life is one run of a machine, from before its start to the record of its end.
type life struct {
	pod       *sandbox.Pod
	container *sandbox.Container
	console   *console.Console
	agent     atomic.Pointer[agent.Agent]
	qga       *agent.QGA
	// claimed is set by the first who tells of the end; ended is closed when that is in the handle's state and on the disk.
	claimed atomic.Bool
	ended   chan struct{}
	// oomKills is oomKills of the cgroup before the start.
	oomKills uint64
	// failed is set by a start that failed before it kills the machine, for the first who tells of the end.
	failed atomic.Pointer[failedStart]
}

// failedStart says what comes of a start that failed; nobody but its caller is told.
type failedStart struct {
	end machine.State
	// undone: the container is as it was created.
	undone bool
}

// close lets go of the machine's sockets and its log.
func (l *life) close() {
	if a := l.agent.Load(); a != nil {
		a.Close()
	}
	l.console.Close()
}

// lookup gives the container's handle, from the disk when it is not in memory. What is not there is errdefs.ErrNotFound.
func (b *Backend) lookup(id string) (*handle, error) {
	b.mu.Lock()
	h := b.containers[id]
	b.mu.Unlock()
	if h != nil {
		return h, nil
	}
	s, err := b.cfg.readState(id)
	if err != nil {
		return nil, err
	}
	return b.keep(&handle{id: id, state: s}), nil
}

// keep puts the handle into the map unless there is one.
func (b *Backend) keep(h *handle) *handle {
	b.mu.Lock()
	defer b.mu.Unlock()
	if old := b.containers[h.id]; old != nil {
		return old
	}
	b.containers[h.id] = h
	return h
}

func (b *Backend) handles() []*handle {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]*handle, 0, len(b.containers))
	for _, h := range b.containers {
		list = append(list, h)
	}
	return list
}

func (h *handle) snapshot() (state, *life) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state, h.life
}

// set changes the state in memory and on the disk.
func (b *Backend) set(h *handle, change func(*state)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.state)
	return noRoom(b.cfg.writeState(h.state))
}

// Status implements sandbox.Backend.
func (b *Backend) Status(_ context.Context, _ *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	h, err := b.lookup(c.ID)
	if errdefs.IsNotFound(err) {
		return sandbox.Status{State: sandbox.StateAbsent}, nil
	}
	if err != nil {
		return sandbox.Status{}, err
	}
	s, _ := h.snapshot()
	return s.status(), nil
}

// running gives a container that runs; any other is errdefs.ErrFailedPrecondition.
func (b *Backend) running(id string) (*handle, *life, error) {
	h, err := b.lookup(id)
	if err != nil && !errdefs.IsNotFound(err) {
		return nil, nil, err
	}
	if err == nil {
		if _, l := h.snapshot(); l != nil {
			return h, l, nil
		}
	}
	return nil, nil, fmt.Errorf("container %s does not run: %w", id, errdefs.ErrFailedPrecondition)
}

// heard takes the driver's word that a machine has ended. It does not wait for the log.
func (b *Backend) heard(e machine.Event) {
	b.mu.Lock()
	h := b.containers[e.Name]
	b.mu.Unlock()
	if h == nil {
		return
	}
	s, l := h.snapshot()
	if l == nil || !e.State.StartedAt.IsZero() && e.State.StartedAt.Equal(s.Former) {
		return // of a run that is over already
	}
	b.tasks.Go(guard.Func(b.log, "end of a machine", func() { b.finish(h, l, e.State) }))
}

// finish records the end of a life and reports it, once; the first to tell of it is believed. It returns when that is done,
// whoever does it.
func (b *Backend) finish(h *handle, l *life, end machine.State) {
	if status, ok := b.record(h, l, end); ok {
		b.report(sandbox.Event{PodID: h.id, ContainerID: h.id, Status: status})
	}
}

// record puts the end of a life into the handle and on the disk once its log is complete, unless that has been done. It tells
// whether others are to hear of it.
func (b *Backend) record(h *handle, l *life, end machine.State) (sandbox.Status, bool) {
	if !l.claimed.CompareAndSwap(false, true) {
		<-l.ended
		return sandbox.Status{}, false
	}
	b.drain(h.id, l)
	h.mu.Lock()
	failed := l.failed.Load()
	if failed != nil {
		end = failed.end
	} else if h.state.NoBoot != "" {
		end.Cause, end.Message = machine.CauseNoBoot, h.state.NoBoot
	} else if end.Cause == machine.CauseOOM {
		end.Message += ": " + b.outOfMemory(l.pod, h.state.Definition.Memory)
	}
	h.state.end(end)
	if failed != nil && failed.undone {
		h.state.Phase = phaseCreated
	}
	h.life = nil
	err := b.cfg.writeState(h.state)
	status := h.state.status()
	h.mu.Unlock()
	if err != nil {
		b.log.Error("record the end of a machine", "container", h.id, "err", err)
	}
	close(l.ended)
	return status, failed == nil
}

// drain waits until all that the machine has said is in the log, and lets go of its console.
func (b *Backend) drain(id string, l *life) {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	if err := l.console.Drain(ctx); err != nil {
		b.log.Error("the log of a machine that has ended is not complete", "container", id, "err", err)
	}
	l.close()
}

// StopContainer implements sandbox.Backend.
func (b *Backend) StopContainer(ctx context.Context, _ *sandbox.Pod, c *sandbox.Container, grace time.Duration) error {
	h, err := b.lookup(c.ID)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	_, l := h.snapshot()
	if l == nil {
		return nil
	}
	if grace > 0 {
		if err := b.askToEnd(ctx, h.id, l, grace); err != nil {
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
	if err := b.cfg.Driver.Destroy(ctx, h.id); err != nil {
		return fmt.Errorf("kill the machine of container %s: %w", h.id, err)
	}
	end, err := b.cfg.Driver.State(ctx, h.id)
	if err != nil || end.Phase != machine.Ended {
		end = machine.State{Cause: machine.CauseKilled, ExitCode: exitKilled, Message: "it was killed"}
	}
	b.finish(h, l, end)
	return nil
}

// exitKilled is the code of what was ended by force, 128 + SIGKILL.
const exitKilled = 137

// RemoveContainer implements sandbox.Backend.
func (b *Backend) RemoveContainer(ctx context.Context, _ *sandbox.Pod, c *sandbox.Container) error {
	return b.removeContainer(ctx, c.ID)
}

// removeContainer removes what there is of a container, known or not.
func (b *Backend) removeContainer(ctx context.Context, id string) error {
	h, err := b.lookup(id)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if h != nil {
		if _, l := h.snapshot(); l != nil {
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
	if err := removeFile(b.cfg.containerFile(id)); err != nil {
		return err
	}
	b.mu.Lock()
	delete(b.containers, id)
	b.mu.Unlock()
	b.sampler.Forget(id)
	return fpRemoved.Hit(ctx)
}
