package wasm

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/wasm/control"
)

var (
	fpSandboxMade    = failpoint.New("wasm.create-sandbox.made")
	fpSandboxRemoved = failpoint.New("wasm.remove-sandbox.removed")
	fpStopped        = failpoint.New("wasm.stop-container.stopped")
	fpForgotten      = failpoint.New("wasm.remove-container.forgotten")
	fpRemoved        = failpoint.New("wasm.remove-container.removed")
	fpUpdated        = failpoint.New("wasm.update-container.updated")
)

// exitKilled is the code of what was ended by force, 128 + SIGKILL.
const exitKilled = 137

// handle is one container: what its file says, and its present life if it runs.
type handle struct {
	id string

	mu    sync.Mutex
	state state
	life  *life
	// former is when the last life that ended began: what is still told of that one is no news.
	former time.Time
}

// life is one run of a container, from before its start to the record of its end.
type life struct {
	worker    *worker
	pod       *sandbox.Pod
	container *sandbox.Container
	// ended is closed when the end is in the handle's state and on the disk.
	ended chan struct{}
}

func newLife(w *worker, p *sandbox.Pod, c *sandbox.Container) *life {
	return &life{worker: w, pod: p, container: c, ended: make(chan struct{})}
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

// finish records the end of a life and reports it, once; the first to tell of it is believed.
func (b *Backend) finish(h *handle, l *life, end control.Status) {
	if status, ok := b.record(h, l, end); ok {
		b.report(sandbox.Event{PodID: h.id, ContainerID: h.id, Status: status})
	}
}

// record puts the end of a life into the handle and on the disk, unless that has been done.
func (b *Backend) record(h *handle, l *life, end control.Status) (status sandbox.Status, ok bool) {
	h.mu.Lock()
	if h.life != l || l == nil {
		h.mu.Unlock()
		return status, false
	}
	s := &h.state
	s.Phase, s.ExitCode, s.Reason, s.Message, s.RenewAt = phaseExited, end.ExitCode, end.Reason, end.Message, time.Time{}
	if !end.StartedAt.IsZero() {
		s.StartedAt = end.StartedAt
	}
	s.FinishedAt = end.FinishedAt
	if s.FinishedAt.Before(s.StartedAt) {
		s.FinishedAt = s.StartedAt
	}
	h.life, h.former = nil, s.StartedAt
	err := b.cfg.writeState(*s)
	status = s.status()
	h.mu.Unlock()
	if err != nil {
		b.log.Error("record the end of a container", "container", h.id, "err", err)
	}
	b.watcher.forget(h.id)
	close(l.ended)
	return status, true
}

// podExited takes a worker's word that a pod has ended.
func (b *Backend) podExited(w *worker, s control.Status) {
	b.mu.Lock()
	h := b.containers[s.ID]
	b.mu.Unlock()
	if h == nil {
		return
	}
	h.mu.Lock()
	l, late := h.life, s.StartedAt.Equal(h.former)
	h.mu.Unlock()
	if l != nil && l.worker == w && !late {
		b.finish(h, l, s)
	}
}

// workerDied records the end of all that ran in a worker whose process has ended.
func (b *Backend) workerDied(w *worker) {
	now, n := time.Now(), 0
	for _, h := range b.handles() {
		if _, l := h.snapshot(); l != nil && l.worker == w {
			n++
			b.finish(h, l, b.deathOf(w, now))
		}
	}
	b.figures.forget(w)
	if w.ending.Load() {
		b.log.Info("ended a worker", "worker", w.name, "pid", w.proc.Pid, "how", w.why)
		return
	}
	b.log.Error("a wasm worker has died", "worker", w.name, "pid", w.proc.Pid, "how", w.why, "containers", n,
		"log", string(process.LogTail(w.logFile(), 2<<10)))
}

// deathOf is the end of a container whose worker ended.
func (b *Backend) deathOf(w *worker, at time.Time) control.Status {
	end := control.Status{
		FinishedAt: at, ExitCode: exitKilled, Reason: sandbox.ReasonError,
		Message: fmt.Sprintf("its wasm worker %s (pid %d) has died: %s", w.name, w.proc.Pid, w.why),
	}
	if w.outOfMemory() {
		end.Reason = sandbox.ReasonOOMKilled
	}
	return end
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
	if err := b.endLife(ctx, h, l, max(grace, 0)); err != nil {
		return err
	}
	return fpStopped.Hit(ctx)
}

// endLife has the worker end the container and returns when that is recorded. When the connection breaks meanwhile, either
// the worker has died, and its pods with it, or the order is given again over the next one.
func (b *Backend) endLife(ctx context.Context, h *handle, l *life, grace time.Duration) error {
	for deadline := time.Now().Add(grace); ; {
		status, err := l.worker.conn().Stop(ctx, h.id, max(0, time.Until(deadline)))
		switch {
		case err == nil:
			b.finish(h, l, status)
			return nil
		case errdefs.IsNotFound(err): // its start never arrived, or did not succeed
			b.finish(h, l, control.Status{FinishedAt: time.Now(), ExitCode: exitKilled, Reason: sandbox.ReasonError, Message: "it was stopped before it ran"})
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("wait for the end of container %s: %w", h.id, context.Cause(ctx))
		case !errdefs.IsUnavailable(err):
			return err
		}
		select {
		case <-l.ended:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of container %s: %w", h.id, context.Cause(ctx))
		case <-time.After(retryPause):
		}
	}
}

// retryPause is how long an order waits for the keeper to connect anew, or to see that the worker has died.
const retryPause = 20 * time.Millisecond

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
		if s, l := h.snapshot(); s.Worker != "" {
			if err := b.forgetIn(ctx, s.Worker, id); err != nil {
				return err
			}
			b.finish(h, l, control.Status{FinishedAt: time.Now(), ExitCode: exitKilled, Reason: sandbox.ReasonError, Message: "it was removed"})
		}
	}
	if err := fpForgotten.Hit(ctx); err != nil {
		return err
	}
	if err := removeFile(b.cfg.containerFile(id)); err != nil {
		return err
	}
	b.mu.Lock()
	delete(b.containers, id)
	b.mu.Unlock()
	b.watcher.forget(id)
	b.sampler.Forget(id)
	if h != nil {
		if err := b.endOwnWorker(ctx, h); err != nil {
			return err
		}
	}
	return fpRemoved.Hit(ctx)
}

// forgetIn has a worker kill the container, if need be, and forget it. A worker that is gone has nothing of it.
func (b *Backend) forgetIn(ctx context.Context, worker, id string) error {
	for {
		w := b.keeper.named(worker)
		if w == nil {
			return nil
		}
		err := w.conn().Remove(ctx, id)
		if err == nil || ctx.Err() != nil || !errdefs.IsUnavailable(err) {
			return err
		}
		select {
		case <-w.died:
		case <-time.After(retryPause):
		case <-ctx.Done():
		}
	}
}

// endOwnWorker ends the worker that a container had for itself.
func (b *Backend) endOwnWorker(ctx context.Context, h *handle) error {
	s, _ := h.snapshot()
	if w := b.keeper.named(s.Worker); w != nil && isOwn(w.scope) {
		return w.end(ctx)
	}
	return nil
}
