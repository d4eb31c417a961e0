package wasm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
)

// Recover implements sandbox.Backend. The workers report which containers are running. The files record which
// containers a worker was ordered to run. If a container's worker no longer runs, the container has exited with the
// worker.
func (b *Backend) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	b.ledger.ReportTo(sink)
	found := sandbox.NewFound()
	if err := b.keeper.Recover(ctx); err != nil {
		b.log.Error("recover workers failed", "err", err)
	}
	if err := b.dialers.Recover(); err != nil {
		b.log.Error("recover dialers failed", "err", err)
	}
	in, err := b.inventory(ctx)
	if err != nil {
		return found, err
	}
	keep := map[string]bool{}
	for _, k := range known {
		keep[k.Pod.ID] = true
		if b.recoverPod(k.Pod.ID) {
			found.Sandboxes[k.Pod.ID] = true
		}
		for _, c := range k.Containers {
			keep[c.ID] = true
			status, err := b.recoverContainer(k.Pod, c, in)
			if err != nil {
				return found, fmt.Errorf("container %s: %w", c.ID, err)
			}
			found.Add(c.ID, status)
		}
	}
	b.keeper.FollowAll()
	b.reconnectSoon()
	if err := b.removeOrphans(ctx, keep, in); err != nil {
		// Orphans do not affect the known pods, so Recover does not fail.
		b.log.Error("remove orphans failed", "err", err)
	}
	b.recoveredOnce.Do(func() { close(b.recovered) })
	return found, nil
}

// inventory holds the status of the workers' pods by worker and container ID.
type inventory map[*workers.Worker]map[string]workerapi.Status

func (b *Backend) inventory(ctx context.Context) (inventory, error) {
	in := inventory{}
	for _, w := range b.keeper.All() {
		list, err := w.Conn().List(ctx)
		if err != nil {
			return nil, fmt.Errorf("list the pods of worker %s: %w", w.Name, err)
		}
		in[w] = map[string]workerapi.Status{}
		for _, s := range list {
			in[w][s.ID] = s
		}
	}
	return in, nil
}

// recoverPod restores a sandbox from its file. It returns false if the sandbox was not created completely, or was
// created before a reboot.
func (b *Backend) recoverPod(id string) bool {
	var s podState
	if err := format.Read(b.cfg.podFile(id), &s); err != nil {
		return false
	}
	b.mu.Lock()
	b.sandboxes[id] = s
	b.mu.Unlock()
	return true
}

// recoverContainer determines a container's state after a restart of the daemon.
func (b *Backend) recoverContainer(p *sandbox.Pod, c *sandbox.Container, in inventory) (sandbox.Status, error) {
	h, err := b.ledger.Find(p.ID, c.ID)
	if h == nil {
		return sandbox.Status{}, err // not created completely, or created before a reboot
	}
	if s, _ := h.Snapshot(); s.Phase == ledger.Started {
		if err := b.recoverStarted(h, p, c, in); err != nil {
			return sandbox.Status{}, err
		}
	}
	s, _ := h.Snapshot()
	return s.Status(), nil
}

// recoverStarted determines the state of a container that is recorded as started.
func (b *Backend) recoverStarted(h *handle, p *sandbox.Pod, c *sandbox.Container, in inventory) error {
	s, _ := h.Snapshot()
	w := b.keeper.ByName(s.Worker)
	if w == nil || w.Proc.ID != s.Process {
		l := newLife(nil, p, c)
		h.Adopt(l)
		b.record(h, l, workerapi.Status{
			StartedAt: s.StartedAt, FinishedAt: time.Now(), ExitCode: sandbox.ExitKilled, Reason: sandbox.ReasonError,
			Message: fmt.Sprintf("its wasm worker %s (pid %d) died while the daemon was not running", s.Worker, s.Process.Pid),
		})
		return nil
	}
	status, there := in[w][h.ID]
	if !there { // the daemon died before it sent the order
		return h.Set(func(s *state) { s.Phase, s.StartedAt = ledger.Created, time.Time{} })
	}
	l := newLife(w, p, c)
	l.quick.Store(status.Quick)
	h.Adopt(l)
	h.UpdateInMemory(l, func(s *state) { s.StartedAt = status.StartedAt })
	if status.State == workerapi.StateExited {
		b.record(h, l, status)
		return nil
	}
	b.followCertificate(h.ID, l)
	return nil
}

// resync records the exits of a worker's containers once there is a new connection, because events can be lost when a
// connection breaks.
func (b *Backend) resync(ctx context.Context, w *workers.Worker) error {
	list, err := w.Conn().List(ctx)
	if err != nil {
		return err
	}
	for _, s := range list {
		if s.State == workerapi.StateExited {
			b.podExited(w, s)
		}
	}
	return nil
}

// startedIn reports whether a container is recorded as started in the worker.
func (b *Backend) startedIn(w *workers.Worker, id string) bool {
	h, err := b.ledger.Find(id, id)
	if h == nil || err != nil {
		return false
	}
	s, _ := h.Snapshot()
	return s.Worker == w.Name
}

// removeOrphans removes the containers and directories that belong to no known pod, and ends unused workers.
func (b *Backend) removeOrphans(ctx context.Context, keep map[string]bool, in inventory) error {
	var errs []error
	for w, pods := range in {
		for id := range pods {
			if !keep[id] || !b.startedIn(w, id) {
				b.log.Info("removing orphaned container", "container", id, "worker", w.Name)
				errs = append(errs, w.Conn().Remove(ctx, id))
			}
		}
	}
	keys := map[string]bool{}
	for id := range keep {
		keys[keyOf(id)] = true
	}
	entries, err := os.ReadDir(b.cfg.podsDir())
	errs = append(errs, err)
	for _, e := range entries {
		if hexID().MatchString(e.Name()) && !keys[e.Name()] {
			b.log.Info("removing orphaned pod", "pod", e.Name())
			errs = append(errs, os.RemoveAll(filepath.Join(b.cfg.podsDir(), e.Name())))
		}
	}
	for w := range in {
		if !b.busy(w) && (w.Retired || b.cfg.Workers != WorkerPerNode || w.Scope != scopeNode) {
			errs = append(errs, w.End(ctx))
		}
	}
	errs = append(errs, b.cgroups.RemoveSlices(ctx, workers.SlicePrefix, keep))
	return errors.Join(errs...)
}
