package linux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

var (
	fpConmon    = failpoint.New("linux.start-container.conmon")
	fpCreated   = failpoint.New("linux.start-container.created")
	fpStarted   = failpoint.New("linux.start-container.started")
	fpSignalled = failpoint.New("linux.stop-container.signalled")
	fpDeleted   = failpoint.New("linux.remove-container.deleted")
	fpUnmounted = failpoint.New("linux.remove-container.unmounted")
	fpReleased  = failpoint.New("linux.remove-container.released")
)

// cleanupTime limits the rollback of a step whose caller may be gone.
const cleanupTime = 30 * time.Second

// handle is one container: its state file's content and, if it runs, its current life.
type handle struct {
	podID, id string
	bundle    string

	mu    sync.Mutex
	state state
	life  *life
}

// life is one run of a container, from its start until its end is recorded.
type life struct {
	launched
	// ended is closed when the end is recorded in the handle and on disk.
	ended chan struct{}

	mu        sync.Mutex
	signalled bool        // the stop signal was sent
	deadline  time.Time   // when kill fires
	kill      *time.Timer // kills the container
	hub       *hub        // the clients attached to it; nil until the first one comes
}

func newLife(l launched) *life { return &life{launched: l, ended: make(chan struct{})} }

// lookup returns the container's handle, from disk if it is not in memory. A missing container, or one whose state is
// unreadable, is ErrNotFound.
func (b *Backend) lookup(podID, id string) (*handle, error) {
	b.mu.Lock()
	h := b.containers[id]
	b.mu.Unlock()
	if h != nil {
		return h, nil
	}
	bundle := b.cfg.bundle(podID, id)
	s, err := readState(bundle)
	if err != nil {
		return nil, err
	}
	return b.keep(&handle{podID: podID, id: id, bundle: bundle, state: s}), nil
}

// keep adds the handle to the map unless the map has one for the container, and returns the map's.
func (b *Backend) keep(h *handle) *handle {
	b.mu.Lock()
	defer b.mu.Unlock()
	if old := b.containers[h.id]; old != nil {
		return old
	}
	b.containers[h.id] = h
	return h
}

func (b *Backend) forget(id string) {
	b.mu.Lock()
	delete(b.containers, id)
	b.mu.Unlock()
	b.sampler.Forget(id)
}

func (h *handle) snapshot() (state, *life) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state, h.life
}

// set changes the state in memory and on disk.
func (h *handle) set(change func(*state)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.state)
	return h.state.write(h.bundle)
}

func (b *Backend) Status(_ context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	h, err := b.lookup(p.ID, c.ID)
	if errdefs.IsNotFound(err) {
		return sandbox.Status{State: sandbox.StateAbsent}, nil
	}
	if err != nil {
		return sandbox.Status{}, err
	}
	s, _ := h.snapshot()
	return s.status(), nil
}

func (b *Backend) StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := b.lookup(p.ID, c.ID)
	if errdefs.IsNotFound(err) {
		return fmt.Errorf("container %s is not created: %w", c.ID, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return err
	}
	s, l := h.snapshot()
	if l != nil {
		return nil // it is running
	}
	if s.Phase != phaseCreated {
		if err := b.clear(ctx, h); err != nil {
			return err
		}
	}
	if err := b.prepareStart(ctx, p, c, h); err != nil {
		return err
	}
	return b.run(ctx, p, c, h)
}

// prepareStart restores what a start needs and may have disappeared since the creation.
func (b *Backend) prepareStart(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) error {
	if err := b.remount(ctx, p, c, h); err != nil {
		return err
	}
	log, err := openLog(p, c)
	if err != nil {
		return err
	}
	return h.set(func(s *state) {
		*s = state{Phase: phaseStarting, BootID: bootID(), OwnPID: s.OwnPID, Cgroup: s.Cgroup, LogPath: log, TTY: s.TTY, Resolved: s.Resolved}
	})
}

// run starts conmon, has it create the container, and starts the program.
func (b *Backend) run(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) error {
	if target := spec.ContainerModes(p, c).Target; target != "" {
		if err := b.pinTarget(p, target, h.id); err != nil {
			return err
		}
	}
	s, _ := h.snapshot()
	got, err := b.conmon.start(ctx, launch{
		id: h.id, bundle: h.bundle, logPath: s.LogPath,
		stdin: c.Config.GetStdin(), stdinOnce: c.Config.GetStdinOnce(), tty: c.Config.GetTty(),
	}, b.cfg, b.runtime)
	if err == nil {
		err = fpCreated.Hit(ctx)
	}
	began := time.Now()
	if err == nil {
		err = b.runtime.start(ctx, h.id)
	}
	if err == nil {
		err = fpStarted.Hit(ctx)
	}
	if err != nil {
		return b.failStart(ctx, h, got, err)
	}
	return b.running(h, got, began)
}

// running records that the container runs and begins to watch it.
func (b *Backend) running(h *handle, got launched, began time.Time) error {
	l := newLife(got)
	h.mu.Lock()
	h.state.Phase, h.state.StartedAt = phaseRunning, began
	h.state.Init, h.state.Conmon = got.init.ID, got.conmon.ID
	h.life = l
	err := h.state.write(h.bundle)
	h.mu.Unlock()
	go guard.Func(b.log, "watch of a container", func() { b.watch(h, l) })()
	return err
}

// failStart rolls back a failed start. If the runtime refused, the container ends with StartError; if the caller went away,
// the container returns to Created.
func (b *Backend) failStart(ctx context.Context, h *handle, got launched, cause error) error {
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if got.conmon != nil { // first, so that conmon writes no exit file
		_ = got.conmon.KillGroup()
		got.conmon.WaitFor(cleanupTime)
	} else if err := b.killMonitor(undo, monitors(b.cfg.Root)[h.id]); err != nil {
		b.log.Error("stop conmon after a failed start", "container", h.id, "err", err)
	}
	if got.init != nil {
		_ = got.init.Signal(unix.SIGKILL)
		got.init.Close()
	}
	err := b.clear(undo, h)
	if ctx.Err() != nil {
		return errors.Join(fmt.Errorf("start container %s: %w", h.id, ctx.Err()), err,
			h.set(func(s *state) { s.Phase = phaseCreated }))
	}
	now := time.Now()
	err = errors.Join(err, h.set(func(s *state) {
		s.Phase, s.StartedAt, s.FinishedAt = phaseExited, now, now
		s.ExitCode, s.Reason, s.Message = sandbox.ExitStartError, sandbox.ReasonStartError, cause.Error()
	}))
	return errors.Join(fmt.Errorf("start container %s: %w: %w", h.id, cause, errdefs.ErrFailedPrecondition), err)
}

// clear removes what the OCI runtime and conmon keep from an earlier run.
func (b *Backend) clear(ctx context.Context, h *handle) error {
	s, _ := h.snapshot()
	if err := b.wipe(ctx, h.id, s.Cgroup, s.Phase == phaseStarting); err != nil {
		return err
	}
	for _, name := range []string{
		b.exitFile(h.id), initPidFile(h.bundle), conmonPidFile(h.bundle), filepath.Join(h.bundle, "oom"),
	} {
		if err := removeEmpty(name); err != nil {
			return err
		}
	}
	return nil
}

// wipe removes what the OCI runtime holds of a container, including its cgroup. For a half-made container it first kills what
// runs in the cgroup, because nobody has seen its end. A runtime that was killed during its work may leave state that it
// cannot read.
func (b *Backend) wipe(ctx context.Context, id, cgroup string, halfMade bool) error {
	if halfMade && cgroup != "" {
		if err := b.cgroups.Kill(ctx, cgroup); err != nil {
			return err
		}
	}
	if err := b.runtime.delete(ctx, id); err != nil {
		if ctx.Err() != nil {
			return err
		}
		b.log.Warn("the OCI runtime cannot delete a container; removing its state directly", "container", id, "err", err)
		if err := os.RemoveAll(filepath.Join(b.cfg.ociDir(), id)); err != nil {
			return err
		}
	}
	return b.cgroups.Remove(ctx, cgroup)
}

// pinTarget pins the PID namespace of another container of the pod for one that joins it.
func (b *Backend) pinTarget(p *sandbox.Pod, target, id string) error {
	h, err := b.lookup(p.ID, target)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if err == nil {
		if _, l := h.snapshot(); l != nil {
			return pinPID(l.init, b.targetPin(p.ID, id))
		}
	}
	return fmt.Errorf("target container %s of the PID namespace is not running in this pod: %w", target, errdefs.ErrFailedPrecondition)
}

// targetPin is the pin of the PID namespace that a container joins with TARGET.
func (b *Backend) targetPin(podID, id string) string {
	return filepath.Join(b.cfg.podRunDir(podID), "ns", "pid-"+id)
}

func (b *Backend) StopContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, grace time.Duration) error {
	h, err := b.lookup(p.ID, c.ID)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	s, l := h.snapshot()
	if l == nil {
		return nil
	}
	if err := b.askToStop(h, l, s, max(grace, 0)); err != nil {
		return err
	}
	if err := fpSignalled.Hit(ctx); err != nil {
		return err
	}
	select {
	case <-l.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of container %s: %w", c.ID, ctx.Err())
	}
}

// askToStop sends the stop signal, once per life, and schedules the kill after grace, or earlier if an earlier call demanded
// that.
func (b *Backend) askToStop(h *handle, l *life, s state, grace time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	deadline := time.Now().Add(grace)
	if l.kill == nil || deadline.Before(l.deadline) {
		if l.kill != nil {
			l.kill.Stop()
		}
		l.deadline = deadline
		l.kill = time.AfterFunc(grace, func() { b.killLife(h, l) })
	}
	if l.signalled || grace == 0 {
		return nil
	}
	l.signalled = true
	if err := l.init.Signal(s.Resolved.signal()); err != nil {
		return fmt.Errorf("send the stop signal: %w", err)
	}
	return nil
}

// killLife kills the container and everything that it started.
func (b *Backend) killLife(h *handle, l *life) {
	if err := l.init.Signal(unix.SIGKILL); err != nil {
		b.log.Error("kill a container", "container", h.id, "pid", l.init.Pid, "err", err)
	}
	s, _ := h.snapshot()
	if s.OwnPID {
		return // the kernel kills a PID namespace with its init
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	if err := b.cgroups.Kill(ctx, s.Cgroup); err != nil {
		b.log.Error("kill a container's processes", "container", h.id, "cgroup", s.Cgroup, "err", err)
	}
}

func (b *Backend) RemoveContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	_, cgroup := b.cgroups.container(p, c.ID)
	return b.removeContainer(ctx, p.ID, c.ID, cgroup)
}

// removeContainer removes all of a container, whether known or not. An empty cgroup is looked up.
func (b *Backend) removeContainer(ctx context.Context, podID, id, cgroup string) error {
	h, err := b.lookup(podID, id)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	halfMade := true
	if h != nil {
		s, l := h.snapshot()
		if cgroup == "" {
			cgroup = s.Cgroup
		}
		if err := b.endLife(ctx, h, l); err != nil {
			return err
		}
		halfMade = s.Phase == phaseStarting
	}
	if err := b.wipe(ctx, id, cgroup, halfMade); err != nil {
		return err
	}
	if err := fpDeleted.Hit(ctx); err != nil {
		return err
	}
	bundle := b.cfg.bundle(podID, id)
	if err := errors.Join(unmountAll(bundle), unpin(b.targetPin(podID, id))); err != nil {
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
	b.forget(id)
	return errors.Join(removeEmpty(b.exitFile(id)), removeBundle(bundle))
}

// endLife kills a running container and waits until its end is recorded.
func (b *Backend) endLife(ctx context.Context, h *handle, l *life) error {
	if l == nil {
		return nil
	}
	b.killLife(h, l)
	select {
	case <-l.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of container %s: %w", h.id, ctx.Err())
	}
}
