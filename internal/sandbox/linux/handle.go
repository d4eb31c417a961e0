package linux

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
	"github.com/tripod-run/tripod/internal/spans"
)

var (
	fpCreated   = failpoint.New("linux.start-container.created")
	fpStarted   = failpoint.New("linux.start-container.started")
	fpSignalled = failpoint.New("linux.stop-container.signalled")
	fpDeleted   = failpoint.New("linux.remove-container.deleted")
	fpUnmounted = failpoint.New("linux.remove-container.unmounted")
	fpReleased  = failpoint.New("linux.remove-container.released")
)

// cleanupTime limits a rollback or a kill, because neither may depend on a caller's context.
const cleanupTime = 30 * time.Second

// handle is a container in the ledger.
type handle = ledger.Handle[state, life]

// bundleOf returns the directory of a container's bundle.
func (b *Backend) bundleOf(h *handle) string { return b.cfg.bundle(h.PodID, h.ID) }

// life is one run of a container, from its start until its end is recorded.
type life struct {
	oci.Processes
	// ended is closed when the end is recorded in the handle and on disk.
	ended chan struct{}

	mu        sync.Mutex
	signalled bool        // the stop signal was sent
	deadline  time.Time   // when kill fires
	kill      *time.Timer // kills the container
	killed    bool        // it was killed as ordered: kill fired, or the stop signal is SIGKILL
}

func newLife(l oci.Processes) *life { return &life{Processes: l, ended: make(chan struct{})} }

// wait waits until the end of the container is recorded.
func (l *life) wait(ctx context.Context, id string) error {
	select {
	case <-l.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of container %s: %w", id, ctx.Err())
	}
}

// Status implements sandbox.Backend.
func (b *Backend) Status(_ context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	return b.ledger.Status(p.ID, c.ID)
}

func (b *Backend) StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := b.ledger.Startable(p.ID, c.ID)
	if h == nil {
		return err
	}
	b.joins.Expect()
	if s, _ := h.Snapshot(); s.Phase != ledger.Created {
		if err := b.clearEarlierRun(ctx, h); err != nil {
			return err
		}
	}
	config, err := b.prepareStart(ctx, p, c, h)
	if err != nil {
		return err
	}
	return b.run(ctx, p, c, h, config)
}

// prepareStart restores the mounts, the specification and the log file, because all of these can be lost. Then it
// records the start, and returns the specification.
func (b *Backend) prepareStart(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) (*specs.Spec, error) {
	config, err := b.remount(ctx, p, c, h)
	if err != nil {
		return nil, err
	}
	log, err := openLog(p, c)
	if err != nil {
		return nil, err
	}
	before, _ := h.Snapshot()
	kills := b.podOOMKills(before.Cgroup)
	return config, h.Set(func(s *state) {
		*s = state{Record: ledger.Record{Phase: ledger.Starting}, BootID: bootID(), OwnPID: ownPID(config), Forgettable: forgettable(config),
			Cgroup: s.Cgroup, EarlierOOMKills: kills, LogPath: log, TTY: s.TTY, Resolved: s.Resolved}
	})
}

// run creates the container and starts its program. A panic is undone like any other failure.
func (b *Backend) run(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle, config *specs.Spec) error {
	if target := spec.ContainerModes(p, c).Target; target != "" {
		if err := b.pinTarget(p, target, h.ID); err != nil {
			return err
		}
	}
	var got oci.Processes
	var began time.Time
	err := guard.Call(b.log, "StartContainer", func() (err error) {
		if got, err = b.runConmon(ctx, p, c, h); err != nil {
			return err
		}
		if err := fpCreated.Hit(ctx); err != nil {
			return err
		}
		s, _ := h.Snapshot()
		if err := b.cgroups.limitScope(s.Cgroup, config.Linux.Resources); err != nil {
			return err
		}
		began = time.Now()
		return b.runProgram(ctx, h.ID, config)
	})
	if err != nil {
		return b.failStart(ctx, h, got, err)
	}
	return b.watchRunning(h, got, began)
}

// runConmon starts conmon, which creates the container. If it fails, it can return processes that are to be ended.
func (b *Backend) runConmon(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) (got oci.Processes, err error) {
	s, _ := h.Snapshot()
	ctx, end := spans.Start(ctx, "oci.create", spans.String("oci.runtime", filepath.Base(b.runtime.Path)))
	defer func() { end(err) }()
	return b.conmon.Start(ctx, oci.Launch{
		ID: h.ID, Bundle: b.bundleOf(h), LogPath: s.LogPath, Stdio: stdioOf(c), Foreign: p.IDMap() != nil,
	}, b.runtime)
}

// runProgram starts the program of a container that conmon has created.
func (b *Backend) runProgram(ctx context.Context, id string, config *specs.Spec) error {
	err := spans.Run(ctx, "oci.start", func(ctx context.Context) error {
		return b.runtime.Start(ctx, id, config.Hooks != nil && len(config.Hooks.Poststart) > 0)
	})
	if err != nil {
		return err
	}
	return fpStarted.Hit(ctx)
}

// stdioOf returns how a container's stdio is connected.
func stdioOf(c *sandbox.Container) oci.Stdio {
	return oci.Stdio{Stdin: c.Config.GetStdin(), StdinOnce: c.Config.GetStdinOnce(), TTY: c.Config.GetTty()}
}

// watchRunning records that the container is running, and starts to watch it.
func (b *Backend) watchRunning(h *handle, got oci.Processes, began time.Time) error {
	l := newLife(got)
	h.Adopt(l)
	_, err := h.Update(l, func(s *state) {
		s.Phase, s.StartedAt, s.Init, s.Conmon = ledger.Running, began, got.Init.ID, got.Conmon.ID
	})
	go guard.Func(b.log, "watch of a container", func() { b.watch(h, l) })()
	return err
}

// failStart rolls back a failed start. If the runtime refused, the container ends with StartError; if the caller went
// away, the container returns to Created.
func (b *Backend) failStart(ctx context.Context, h *handle, got oci.Processes, cause error) error {
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if got.Conmon != nil { // conmon is killed before init, so that it writes no exit file
		_ = got.Conmon.KillGroup()
		got.Conmon.WaitFor(cleanupTime)
	}
	if got.Init != nil {
		_ = got.Init.Signal(unix.SIGKILL)
		got.Init.Close()
	}
	err := b.clearEarlierRun(undo, h)
	if ctx.Err() != nil {
		return errors.Join(fmt.Errorf("start container %s: %w", h.ID, ctx.Err()), err,
			h.Set(func(s *state) { s.Phase = ledger.Created }))
	}
	err = errors.Join(err, h.Set(func(s *state) { s.FailStart(cause) }))
	classified := sandbox.DiskError(cause)
	if !errdefs.IsResourceExhausted(classified) && !errdefs.IsUnavailable(classified) && !errdefs.IsInternal(classified) {
		classified = fmt.Errorf("%w: %w", cause, errdefs.ErrFailedPrecondition)
	}
	return errors.Join(fmt.Errorf("start container %s: %w", h.ID, classified), err)
}

// clearEarlierRun removes what the OCI runtime and conmon keep from an earlier run.
func (b *Backend) clearEarlierRun(ctx context.Context, h *handle) error {
	s, _ := h.Snapshot()
	b.forbidden.forget(h.ID)
	if err := b.deleteRuntimeState(ctx, h.ID, s); err != nil {
		return err
	}
	if err := ledger.RemoveFile(b.exitFile(h.ID)); err != nil {
		return err
	}
	return oci.RemoveRunFiles(b.bundleOf(h))
}

// deleteRuntimeState removes a container's cgroup and its state in the OCI runtime. If the container's start may have
// been interrupted, deleteRuntimeState first kills the conmon that may still create the container, and the processes in
// the cgroup. A runtime that was killed can leave a state that it cannot read later. Such a state is removed without the
// runtime. So is the state of a container whose end is recorded, because the runtime would do nothing else (see
// state.Forgettable).
func (b *Backend) deleteRuntimeState(ctx context.Context, id string, s state) error {
	if s.Phase == ledger.Starting {
		if err := b.killMonitor(ctx, oci.Monitors(b.cfg.Root)[id]); err != nil {
			return fmt.Errorf("stop conmon after an interrupted start: %w", err)
		}
		if s.Cgroup != "" {
			if err := b.cgroups.Kill(ctx, s.Cgroup); err != nil {
				return err
			}
		}
	}
	if s.Phase == ledger.Exited && s.Forgettable && !b.runtime.Systemd {
		return errors.Join(b.runtime.Forget(id), b.cgroups.Remove(ctx, s.Cgroup))
	}
	if err := b.runtime.Delete(ctx, id); err != nil {
		if ctx.Err() != nil {
			return err
		}
		b.log.Warn("the OCI runtime cannot delete a container; removing its state directly", "container", id, "err", err)
		if err := b.runtime.Forget(id); err != nil {
			return err
		}
	}
	return b.cgroups.Remove(ctx, s.Cgroup)
}

// forgettable reports whether a specification has neither hooks to run after the container's end nor a resource control
// group to remove.
func forgettable(config *specs.Spec) bool {
	return (config.Hooks == nil || len(config.Hooks.Poststop) == 0) && (config.Linux == nil || config.Linux.IntelRdt == nil)
}

// pinTarget pins the PID namespace of the target container, so that the container with the given ID can join the
// namespace.
func (b *Backend) pinTarget(p *sandbox.Pod, target, id string) error {
	_, l, err := b.ledger.FindRun(p.ID, target)
	if err != nil {
		return err
	}
	if l != nil {
		return shared.PinPID(l.Init, b.targetPin(p.ID, id))
	}
	return fmt.Errorf("target container %s of the PID namespace is not running in this pod: %w", target, errdefs.ErrFailedPrecondition)
}

// targetPin returns the path on which pinTarget pins the PID namespace that a container joins.
func (b *Backend) targetPin(podID, id string) string {
	return filepath.Join(b.cfg.podRunDir(podID), "ns", "pid-"+id)
}

func (b *Backend) StopContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, grace time.Duration) error {
	h, l, err := b.ledger.FindRun(p.ID, c.ID)
	if l == nil {
		return err
	}
	s, _ := h.Snapshot()
	if err := b.askToStop(h, l, s, max(grace, 0)); err != nil {
		return err
	}
	if err := fpSignalled.Hit(ctx); err != nil {
		return err
	}
	return l.wait(ctx, c.ID)
}

// askToStop sends the stop signal, but only once per life, and schedules the kill for the end of the grace period. If a
// previous call set an earlier deadline, the earlier deadline stays in effect.
func (b *Backend) askToStop(h *handle, l *life, s state, grace time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	deadline := time.Now().Add(grace)
	if l.kill == nil || deadline.Before(l.deadline) {
		if l.kill != nil {
			l.kill.Stop()
		}
		l.deadline = deadline
		l.kill = time.AfterFunc(grace, func() {
			l.mu.Lock()
			l.killed = true
			l.mu.Unlock()
			b.killLife(h, l)
		})
	}
	if l.signalled || grace == 0 {
		return nil
	}
	l.signalled = true
	stop := spec.SignalNumber(s.Resolved.StopSignal)
	l.killed = l.killed || stop == unix.SIGKILL
	if err := l.Init.Signal(stop); err != nil {
		return fmt.Errorf("send the stop signal: %w", err)
	}
	return nil
}

// killLife kills all processes of the container, including those that the container left behind in a shared PID
// namespace.
func (b *Backend) killLife(h *handle, l *life) {
	if err := l.Init.Signal(unix.SIGKILL); err != nil {
		b.log.Error("kill a container", "container", h.ID, "pid", l.Init.Pid, "err", err)
	}
	s, _ := h.Snapshot()
	if s.OwnPID {
		return // when init ends, the kernel kills all processes in its PID namespace
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	if err := b.cgroups.Kill(ctx, s.Cgroup); err != nil {
		b.log.Error("kill a container's processes", "container", h.ID, "cgroup", s.Cgroup, "err", err)
	}
}

func (b *Backend) RemoveContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	_, cgroup := b.cgroups.container(p, c.ID)
	return b.removeContainer(ctx, p.ID, c.ID, cgroup)
}

// removeContainer removes everything that belongs to a container, even if the container is not in the record. If the
// given cgroup is "", removeContainer takes the cgroup from the container's state file.
func (b *Backend) removeContainer(ctx context.Context, podID, id, cgroup string) error {
	h, err := b.ledger.Find(podID, id)
	if err != nil {
		return err
	}
	s := state{Record: ledger.Record{Phase: ledger.Starting}} // the worst, if nothing is known
	if h != nil {
		if _, l := h.Snapshot(); l != nil {
			b.killLife(h, l)
			if err := l.wait(ctx, id); err != nil {
				return err
			}
		}
		s, _ = h.Snapshot()
	}
	s.Cgroup = cmp.Or(cgroup, s.Cgroup)
	bundle := b.cfg.bundle(podID, id)
	if err := b.deleteRuntimeState(ctx, id, s); err != nil {
		return err
	}
	if err := fpDeleted.Hit(ctx); err != nil {
		return err
	}
	if err := errors.Join(b.unmountAll(podID, id), mnt.RemovePoint(b.targetPin(podID, id))); err != nil {
		return err
	}
	if err := fpUnmounted.Hit(ctx); err != nil {
		return err
	}
	if err := b.releaseSnapshots(ctx, bundle, id); err != nil {
		return err
	}
	if err := fpReleased.Hit(ctx); err != nil {
		return err
	}
	if err := b.ledger.Remove(podID, id); err != nil {
		return err
	}
	b.forbidden.forget(id)
	b.sampler.Forget(id)
	return errors.Join(ledger.RemoveFile(b.exitFile(id)), removeBundle(bundle))
}
