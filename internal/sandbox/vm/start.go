package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/console"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/rootdisk"
	"github.com/tripod-run/tripod/internal/spans"
	"github.com/tripod-run/tripod/internal/stream"
)

var (
	fpOpened  = failpoint.New("vm.start-container.opened")
	fpIntent  = failpoint.New("vm.start-container.intent")
	fpBooted  = failpoint.New("vm.start-container.booted")
	fpStarted = failpoint.New("vm.start-container.started")
)

// cleanupTime bounds the rollback of a failed start, which continues after the caller's context ends.
const cleanupTime = 30 * time.Second

// StartContainer implements sandbox.Backend. It returns when the machine's CPUs run or, if the annotation
// wait-for-agent is set, when the guest's agent answers.
func (b *Backend) StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := b.ledger.Startable(p.ID, c.ID)
	if h == nil {
		return err
	}
	if err := b.prepare(ctx, p, c, h); err != nil {
		return b.refuseStart(ctx, h, err)
	}
	l, err := b.openLife(p, c, h)
	if err != nil {
		return b.refuseStart(ctx, h, err)
	}
	began := time.Now()
	err = spans.Run(ctx, "vm.start", func(ctx context.Context) error {
		return guard.Call(b.log, "StartContainer", func() error { return b.run(ctx, h, l) })
	})
	if err != nil {
		if b.templates != nil && errors.Is(err, machine.ErrSaved) && ctx.Err() == nil {
			b.templates.Failed(templateOf(h), began, errors.Is(err, machine.ErrRefused))
			return b.bootInstead(ctx, p, c, h, l, err)
		}
		return b.failStart(ctx, h, l, err)
	}
	b.startedFrom(ctx, p, c, h)
	return fpStarted.Hit(ctx)
}

// prepare gives the machine the memory that was last requested, checks the image and the root device, makes the cgroup,
// and sets the cgroup's limits.
func (b *Backend) prepare(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) error {
	if err := b.redefineMemory(ctx, p, c, h); err != nil {
		return err
	}
	s, _ := h.Snapshot()
	files, err := b.cfg.Images.OpenDisk(ctx, h.ID, s.Image)
	if err != nil {
		return fmt.Errorf("the machine's image: %w", err)
	}
	files.Close()
	if s.RootID != "" {
		vars := uint64(0)
		if s.Definition.UEFI != nil {
			vars = s.Definition.UEFI.Vars.Size
		}
		if err := rootdisk.Check(s.Definition.Disks[0].Path, s.RootID, vars); err != nil {
			return err
		}
	}
	if err := b.cgroups.Create(s.Definition.Cgroup); err != nil {
		return err
	}
	if err := b.cgroups.Limit(s.Definition.Cgroup, s.Definition.Memory, sandbox.Resources(p, c)); err != nil {
		return fmt.Errorf("limit the machine: %w", err)
	}
	return fpOpened.Hit(ctx)
}

// openLife opens the machine's console, which writes to the container's log, and returns a new life.
func (b *Backend) openLife(p *sandbox.Pod, c *sandbox.Container, h *handle) (*life, error) {
	s, _ := h.Snapshot()
	terminal, err := console.Open(console.Config{
		SerialLog: s.Definition.SerialLog, Input: b.cfg.socket(c.ID, machine.SerialInput), StateFile: b.cfg.consoleFile(c.ID),
		OpenLog:    func() (*os.File, error) { return stream.OpenLogFile(p.Config.GetLogDirectory(), c.Config.GetLogPath()) },
		LogSizeMax: b.cfg.LogSizeMax, TTY: c.Config.GetTty(),
		Logger: b.log.With("container", c.ID),
	})
	if err != nil {
		return nil, fmt.Errorf("open the machine's console: %w", err)
	}
	qga := agent.OpenQGA(b.cfg.socket(c.ID, machine.QGASocket))
	return &life{pod: p, container: c, console: terminal, qga: qga, ended: make(chan struct{})}, nil
}

// run starts the machine and, if the annotation wait-for-agent is set, waits for the guest's agent.
func (b *Backend) run(ctx context.Context, h *handle, l *life) error {
	s, _ := h.Snapshot()
	if why := b.shortage(l.pod, s.Definition.Memory); why != "" {
		b.log.Warn("machine may run out of memory", "container", h.ID, "reason", why)
	}
	l.oomKills = oomKills(s.Definition.Cgroup)
	err := h.Begin(l, func(s *state) {
		s.PreviousStart = s.StartedAt
		s.Start()
		s.NoBoot, s.Silent, s.SerialBefore, s.Renew = "", false, sizeOf(s.Definition.SerialLog), b.templates != nil && s.Definition.Saved != ""
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", h.ID, err)
	}
	if err := fpIntent.Hit(ctx); err != nil {
		return err
	}
	if b.templates != nil && s.Definition.Saved != "" {
		return b.continueFrom(ctx, h, l, s.Definition)
	}
	actual, err := b.startDriver(ctx, h)
	if err != nil {
		return err
	}
	wait, err := b.booted(h, l, actual)
	if err != nil || !wait {
		return err
	}
	return b.awaitAgent(ctx, h, l)
}

// startDriver makes the driver start the machine, and returns the machine's state.
func (b *Backend) startDriver(ctx context.Context, h *handle) (machine.State, error) {
	if err := b.cfg.Driver.Start(ctx, h.ID); err != nil {
		return machine.State{}, err
	}
	if err := fpBooted.Hit(ctx); err != nil {
		return machine.State{}, err
	}
	return b.cfg.Driver.State(ctx, h.ID)
}

// booted records the state of a started machine and connects to its agent. It returns whether to wait for the agent.
func (b *Backend) booted(h *handle, l *life, actual machine.State) (wait bool, err error) {
	l.agent.Store(agent.Open(b.cfg.socket(h.ID, machine.AgentSocket), b.log.With("container", h.ID)))
	if actual.Phase != machine.Running {
		return false, nil // the machine has already ended
	}
	current, err := h.Update(l, func(s *state) { s.Pid, s.StartedAt, wait = actual.Pid, actual.StartedAt, s.WaitForAgent })
	if current {
		b.tasks.Go(guard.Func(b.log, "boot of a machine", func() { b.watchBoot(h, l, actual.StartedAt) }))
	}
	return wait, err
}

// awaitAgent waits until the guest's agent answers. It returns an error if the machine ends first.
func (b *Backend) awaitAgent(ctx context.Context, h *handle, l *life) error {
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-l.ended:
			cancel()
		case <-waiting.Done():
		}
	}()
	err := l.agent.Load().Wait(waiting)
	if err != nil && waiting.Err() != nil && ctx.Err() == nil {
		s, _ := h.Snapshot()
		return fmt.Errorf("%w: the machine has ended: %s %s: %w", ErrNoAgent, s.Reason, s.Message, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("annotation tripod.dev/vm.wait-for-agent: %w: %w", ErrNoAgent, err)
	}
	return nil
}

// ErrNoAgent means that the agent in a guest has not answered while its machine was started.
var ErrNoAgent = errors.New("the guest's agent has not answered")

// refuseStart records a start that failed before the driver was called.
func (b *Backend) refuseStart(ctx context.Context, h *handle, cause error) error {
	cause = fmt.Errorf("start container %s: %w", h.ID, cause)
	if ctx.Err() != nil {
		return cause // the container can be started again
	}
	return errors.Join(cause, h.Set(func(s *state) { s.end(startError(cause)) }))
}

func startError(cause error) machine.State {
	now := time.Now()
	return machine.State{Phase: machine.Ended, Cause: machine.CauseStart, StartedAt: now, FinishedAt: now, Message: cause.Error()}
}

// failStart kills the machine of a failed start and records the failure. If ctx has ended, the container returns to the
// state Created instead.
func (b *Backend) failStart(ctx context.Context, h *handle, l *life, cause error) error {
	s, _ := h.Snapshot()
	end, cause := b.failedEnd(h.ID, l, cause, s.Definition)
	return errors.Join(cause, b.endStart(ctx, h, l, failedStart{end: end, undone: ctx.Err() != nil}))
}

// undoStart kills the machine of a failed start. The container returns to the state Created.
func (b *Backend) undoStart(ctx context.Context, h *handle, l *life, cause error) error {
	return b.endStart(ctx, h, l, failedStart{end: startError(cause), undone: true})
}

// endStart kills the machine of a failed start and records its end.
func (b *Backend) endStart(ctx context.Context, h *handle, l *life, failed failedStart) error {
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	l.failed.Store(&failed)
	if err := b.cfg.Driver.Destroy(undo, h.ID); err != nil {
		l.failed.Store(nil)
		return fmt.Errorf("kill the machine: %w", err) // it may still run
	}
	b.record(h, l, machine.State{})
	return nil
}
