package wasm

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
)

var (
	fpSandboxMade    = failpoint.New("wasm.create-sandbox.made")
	fpSandboxRemoved = failpoint.New("wasm.remove-sandbox.removed")
	fpStopped        = failpoint.New("wasm.stop-container.stopped")
	fpForgotten      = failpoint.New("wasm.remove-container.forgotten")
	fpRemoved        = failpoint.New("wasm.remove-container.removed")
	fpUpdated        = failpoint.New("wasm.update-container.updated")
)

// handle is a container in the ledger.
type handle = ledger.Handle[state, life]

// life is one run of a container. It begins before the container is started and ends once the container's exit is
// recorded.
type life struct {
	worker    *workers.Worker
	pod       *sandbox.Pod
	container *sandbox.Container
	// memory is the present memory limit in bytes; 0 or less means no limit.
	memory atomic.Int64
	// quick is set while the worker runs code that is not optimised.
	quick atomic.Bool
	// ended is closed once the end of the run is recorded.
	ended chan struct{}
}

func newLife(w *workers.Worker, p *sandbox.Pod, c *sandbox.Container) *life {
	l := &life{worker: w, pod: p, container: c, ended: make(chan struct{})}
	l.memory.Store(workers.MemoryLimit(p, c))
	return l
}

// Status implements sandbox.Backend.
func (b *Backend) Status(_ context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	return b.ledger.Status(p.ID, c.ID)
}

// finish records the end of a run and reports it. Only the first call for a run has an effect.
func (b *Backend) finish(h *handle, l *life, end workerapi.Status) {
	if status, ok := b.record(h, l, end); ok {
		b.ledger.Report(sandbox.Event{PodID: h.PodID, ContainerID: h.ID, Status: status})
	}
}

// record records the end of a run. It returns false if the end is already recorded.
func (b *Backend) record(h *handle, l *life, end workerapi.Status) (sandbox.Status, bool) {
	if l == nil {
		return sandbox.Status{}, false
	}
	status, ok := h.End(l, func(s *state) {
		if !end.StartedAt.IsZero() {
			s.StartedAt = end.StartedAt
		}
		s.Previous, s.RenewAt = s.StartedAt, time.Time{}
		s.Exit(end.FinishedAt, end.ExitCode, end.Reason, end.Message)
	})
	if ok {
		b.watcher.Forget(h.ID)
		close(l.ended)
		if sandbox.IsForeign(l.pod, l.container) {
			b.endForeignWorker(h.ID)
		}
	}
	return status, ok
}

// endForeignWorker ends the worker of a foreign container in the background. The worker ends with the container, because
// its memory counts for the pod, whose other containers continue.
func (b *Backend) endForeignWorker(id string) {
	go guard.Func(b.log, "end of a worker", func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
		defer cancel()
		if err := b.endWorkers(ctx, ownScope(id)); err != nil {
			b.log.Warn("end worker failed", "container", id, "err", err)
		}
	})()
}

// podExited handles the event that a worker's pod has exited.
func (b *Backend) podExited(w *workers.Worker, s workerapi.Status) {
	h := b.ledger.Loaded(s.ID)
	if h == nil {
		return
	}
	if known, l := h.Snapshot(); l != nil && l.worker == w && !s.StartedAt.Equal(known.Previous) {
		b.finish(h, l, s)
	}
}

// podFellBack handles a worker's event that a pod runs slower than it could.
func (b *Backend) podFellBack(w *workers.Worker, f workerapi.Fallback) {
	h := b.ledger.Loaded(f.ID)
	if h == nil {
		return
	}
	if _, l := h.Snapshot(); l != nil && l.worker == w {
		b.reportFallback(l, f.Reason)
	}
}

// reportFallback tells the user that a running container runs slower than it could.
func (b *Backend) reportFallback(l *life, reason string) {
	b.log.Info("component runs slower than it could", "pod", l.pod.ID, "container", l.container.ID, "why", reason)
	b.ledger.Report(sandbox.Event{PodID: l.pod.ID, ContainerID: l.container.ID, Fallback: reason})
}

// workerDied records the end of all containers of a worker whose process has ended.
func (b *Backend) workerDied(w *workers.Worker) {
	now, n := time.Now(), 0
	for _, h := range b.ledger.All() {
		if _, l := h.Snapshot(); l != nil && l.worker == w {
			n++
			b.finish(h, l, b.exitOf(w, now))
		}
	}
	b.figures.forget(w)
	if w.Ending.Load() {
		b.log.Info("worker exited", "worker", w.Name, "pid", w.Proc.Pid, "how", w.Why)
		return
	}
	b.log.Error("worker died", "worker", w.Name, "pid", w.Proc.Pid, "how", w.Why, "containers", n,
		"log", string(process.LogTail(w.LogFile(), 2<<10)))
}

// exitOf returns the exit status of a container whose worker has died.
func (b *Backend) exitOf(w *workers.Worker, at time.Time) workerapi.Status {
	end := workerapi.Status{
		FinishedAt: at, ExitCode: sandbox.ExitKilled, Reason: sandbox.ReasonError,
		Message: fmt.Sprintf("its wasm worker %s (pid %d) died: %s", w.Name, w.Proc.Pid, w.Why),
	}
	if w.OutOfMemory() {
		end.Reason = sandbox.ReasonOOMKilled
	}
	return end
}

// StopContainer implements sandbox.Backend.
func (b *Backend) StopContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, grace time.Duration) error {
	h, l, err := b.ledger.FindRun(p.ID, c.ID)
	if l != nil {
		err = b.endLife(ctx, h, l, max(grace, 0))
	}
	if err == nil && sandbox.IsForeign(p, c) {
		err = b.endWorkers(ctx, ownScope(c.ID))
	}
	if l == nil || err != nil {
		return err
	}
	return fpStopped.Hit(ctx)
}

// endLife makes the worker stop the container, and records the exit. If the connection breaks, endLife repeats the
// order until the keeper has reconnected or the worker's death is recorded.
func (b *Backend) endLife(ctx context.Context, h *handle, l *life, grace time.Duration) error {
	for deadline := time.Now().Add(grace); ; {
		status, err := l.worker.Conn().Stop(ctx, h.ID, max(0, time.Until(deadline)))
		switch {
		case err == nil:
			b.finish(h, l, status)
			return nil
		case errdefs.IsNotFound(err): // the order to start the container was lost or failed
			b.finish(h, l, workerapi.Status{FinishedAt: time.Now(), ExitCode: sandbox.ExitKilled, Reason: sandbox.ReasonError,
				Message: "stopped before it was running"})
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("wait for the end of container %s: %w", h.ID, context.Cause(ctx))
		case !errdefs.IsUnavailable(err):
			return err
		}
		select {
		case <-l.ended:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of container %s: %w", h.ID, context.Cause(ctx))
		case <-time.After(workers.RetryPause):
		}
	}
}

// RemoveContainer implements sandbox.Backend.
func (b *Backend) RemoveContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	if err := b.removeContainer(ctx, c.ID); err != nil || !sandbox.IsForeign(p, c) {
		return err
	}
	if err := b.endWorkers(ctx, ownScope(c.ID)); err != nil {
		return err
	}
	return os.RemoveAll(b.cfg.podDir(c.ID))
}

// removeContainer removes a container from its worker and the ledger. If the container is unknown, removeContainer
// removes only the files.
func (b *Backend) removeContainer(ctx context.Context, id string) error {
	h, err := b.ledger.Find(id, id)
	if err != nil {
		return err
	}
	if h != nil {
		if s, l := h.Snapshot(); s.Worker != "" {
			if err := b.removeFromWorker(ctx, s.Worker, id); err != nil {
				return err
			}
			b.finish(h, l, workerapi.Status{FinishedAt: time.Now(), ExitCode: sandbox.ExitKilled, Reason: sandbox.ReasonError, Message: "removed"})
		}
	}
	if err := fpForgotten.Hit(ctx); err != nil {
		return err
	}
	if err := b.ledger.Remove(id, id); err != nil {
		return err
	}
	b.watcher.Forget(id)
	b.sampler.Forget(id)
	if h != nil {
		if err := b.endOwnWorker(ctx, h); err != nil {
			return err
		}
	}
	return fpRemoved.Hit(ctx)
}

// removeFromWorker makes a worker kill and forget the container. It does nothing if the worker has ended.
func (b *Backend) removeFromWorker(ctx context.Context, worker, id string) error {
	for {
		w := b.keeper.ByName(worker)
		if w == nil {
			return nil
		}
		err := w.Conn().Remove(ctx, id)
		if err == nil || ctx.Err() != nil || !errdefs.IsUnavailable(err) {
			return err
		}
		select {
		case <-w.Died:
		case <-time.After(workers.RetryPause):
		case <-ctx.Done():
		}
	}
}

// endOwnWorker ends the worker of a container, unless the worker is shared.
func (b *Backend) endOwnWorker(ctx context.Context, h *handle) error {
	s, _ := h.Snapshot()
	if w := b.keeper.ByName(s.Worker); w != nil && workers.IsOwn(w.Scope) {
		return w.End(ctx)
	}
	return nil
}
