package worker

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// program is what runs in a pod: a server or a command.
type program interface {
	// start returns when the program serves, or runs. It takes the sockets of the spec that it uses, setting them to nil.
	start() error
	// stop asks it to end; kill ends, when it is closed, what does not by itself. It returns soon. Not called twice.
	stop()
	// wait returns when the program has ended.
	wait() exit
	updateTLS(workerapi.TLS) error
	updateLimits(workerapi.Limits) error
	metrics() []workerapi.MethodMetrics
}

// exit is how a program ended.
type exit struct {
	code    int32
	reason  string
	message string
}

// Exit codes of programs that did not choose theirs: 128 and the signal that a process would have died of.
const (
	exitTrap = 134 // SIGABRT
	exitKill = 137 // SIGKILL
)

// Reasons, in the words of the CRI.
const (
	reasonCompleted = "Completed"
	reasonError     = "Error"
	reasonOOMKilled = "OOMKilled"
)

func killed(message string) exit { return exit{exitKill, reasonError, message} }

// pod is one pod, from Start to Remove.
type pod struct {
	worker   *Worker
	spec     workerapi.PodSpec
	code     *code
	output   *output
	stdin    *stdin    // nil: none
	channels *channels // nil: none
	account  *engine.Account
	program  program
	counts   counts

	preopens []engine.Preopen

	lifecycle sync.Mutex // held while the pod is being started
	started   bool       // lifecycle

	// alive ends, with errStopping, when the grace is over: everything of the pod that runs minds it.
	alive context.Context
	kill  context.CancelCauseFunc
	done  chan struct{} // closed when the pod has exited

	mu       sync.Mutex
	status   workerapi.Status
	stopping bool
	deadline *time.Timer // of the grace
	killAt   time.Time
}

// counts are figures of a pod.
type counts struct {
	active                          atomic.Int64
	requests, traps, timeouts, ooms atomic.Uint64
}

func makePod(w *Worker, spec workerapi.PodSpec, c *code) *pod {
	p := &pod{worker: w, spec: spec, code: c, done: make(chan struct{})}
	p.alive, p.kill = context.WithCancelCause(context.Background())
	p.status = workerapi.Status{ID: spec.ID, Component: spec.Component, Digest: spec.Digest, State: workerapi.StateRunning, StartedAt: time.Now()}
	p.preopens = preopens(spec.Mounts)
	p.channels = newChannels(spec, w.router)
	p.account = engine.NewAccount(uint64(spec.Resources.MemoryBytes))
	p.account.Within(w.account)
	p.account.Bound(engine.HeldFiles, spec.Holdings.Files)
	p.account.Bound(engine.HeldResources, spec.Holdings.Handles)
	p.account.Bound(engine.HeldBytes, spec.Holdings.HostBytes)
	setCPU(p.account, spec.Resources)
	if c.world() == engine.WorldCommand {
		p.program = newCommand(p)
	} else {
		p.program = newServer(p)
	}
	return p
}

func setCPU(a *engine.Account, r workerapi.Resources) {
	period := r.CPUPeriod
	if period == 0 {
		period = 100_000 // the kernel's default (cgroups, cpu.max)
	}
	a.SetCPU(time.Duration(r.CPUQuota)*time.Microsecond, time.Duration(period)*time.Microsecond)
}

// start starts the program. After an error nothing of the pod is left. The caller holds p.lifecycle.
func (p *pod) start() error {
	p.output = newOutput(p.spec.Log.File, p.worker.config.LogSizeMax, p.spec.TTY)
	p.spec.Log.File = nil
	if p.spec.Stdin {
		p.stdin = newStdin(p.spec.StdinOnce)
	}
	if err := p.program.start(); err != nil {
		p.kill(errStopping)
		p.release()
		p.mu.Lock()
		p.status.State = workerapi.StateExited // it is no obstacle to the next Start
		p.mu.Unlock()
		close(p.done)
		return err
	}
	p.started = true
	go p.watch()
	return nil
}

// watch waits for the program's end and tells it.
func (p *pod) watch() {
	e := p.program.wait()
	p.kill(errStopping)
	p.release()
	p.mu.Lock()
	if p.deadline != nil {
		p.deadline.Stop()
	}
	p.status.State, p.status.FinishedAt = workerapi.StateExited, time.Now()
	p.status.ExitCode, p.status.Reason, p.status.Message = e.code, e.reason, e.message
	status := p.status
	p.mu.Unlock()
	p.worker.logger.Info("a pod has ended", "pod", p.spec.ID, "component", p.spec.Component, "code", e.code, "reason", e.reason, "message", e.message)
	p.worker.config.Publish(workerapi.Event{Exited: &status})
	close(p.done)
}

// release closes what the pod held. Its guests are gone.
func (p *pod) release() {
	if p.stdin != nil {
		p.stdin.end()
	}
	if p.channels != nil {
		p.channels.close()
		if n := p.channels.dropped(); n > 0 {
			p.output.note(fmt.Sprintf("tripod: %d messages of channels were dropped: the daemon was away, or they were not read", n))
		}
	}
	p.output.end()
	p.spec.CloseFiles()
}

// stop begins the pod's end, or brings it nearer.
func (p *pod) stop(grace time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.status.State == workerapi.StateExited {
		return
	}
	if grace <= 0 {
		p.kill(errStopping) // before anything can end by itself
	}
	at := time.Now().Add(max(grace, 0))
	switch {
	case p.deadline == nil:
		p.killAt, p.deadline = at, time.AfterFunc(grace, func() { p.kill(errStopping) })
	case at.Before(p.killAt):
		p.killAt = at
		p.deadline.Reset(grace)
	}
	if !p.stopping {
		p.stopping = true
		go p.program.stop()
	}
}

func (p *pod) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *pod) currentStatus() workerapi.Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}

func (p *pod) update(u workerapi.Update) error {
	if !p.running() {
		return fmt.Errorf("pod %s has exited: %w", p.spec.ID, errdefs.ErrFailedPrecondition)
	}
	if r := u.Resources; r != nil {
		if r.MemoryBytes < 0 || r.CPUQuota < 0 || r.CPUPeriod < 0 {
			return fmt.Errorf("pod %s: negative resources: %w", p.spec.ID, errdefs.ErrInvalidArgument)
		}
		p.account.SetMemory(uint64(r.MemoryBytes))
		setCPU(p.account, *r)
	}
	if u.Limits == nil {
		return nil
	}
	limits := *u.Limits
	if err := fillLimits(&limits); err != nil {
		return err
	}
	return p.program.updateLimits(limits)
}

func (p *pod) stats() workerapi.Stats {
	s := workerapi.Stats{
		ID: p.spec.ID, Time: time.Now(),
		CPUNanos:    uint64(p.account.CPU()),
		MemoryBytes: p.account.Memory(), PeakBytes: p.account.MemoryPeak(),
		ThrottledNanos: uint64(p.account.Throttled()),
		Instances:      p.account.Instances(), Active: int(p.counts.active.Load()),
		Requests: p.counts.requests.Load(), Traps: p.counts.traps.Load(),
		Timeouts: p.counts.timeouts.Load(), OutOfMemory: p.counts.ooms.Load(),
		LogDropped: p.logDropped(),
		Holdings: workerapi.Holdings{
			Files: p.account.Held(engine.HeldFiles), Handles: p.account.Held(engine.HeldResources), HostBytes: p.account.Held(engine.HeldBytes),
		},
	}
	s.Connections, s.Rejected = p.connections()
	if p.channels != nil {
		s.ChannelDropped = p.channels.dropped()
	}
	return s
}

// connections are those that are open, and counts of those that were refused or closed early.
func (p *pod) connections() (open int, rejected map[string]uint64) {
	p.lifecycle.Lock() // the server is made in start
	defer p.lifecycle.Unlock()
	s, ok := p.program.(*server)
	if !ok || s.plane == nil {
		return 0, nil
	}
	stats := s.plane.Stats()
	return stats.Connections + stats.QUICConnections, stats.Rejected
}

func (p *pod) logDropped() uint64 {
	p.lifecycle.Lock() // output is set in start
	defer p.lifecycle.Unlock()
	if p.output == nil {
		return 0
	}
	return p.output.dropped.Load()
}

func (p *pod) metrics() workerapi.Metrics {
	return workerapi.Metrics{ID: p.spec.ID, Component: p.spec.Component, Methods: p.program.metrics()}
}

// count adds a guest's failure to the pod's figures, and its cause to the log.
func (p *pod) count(ctx context.Context, what string, err error) failure {
	f := classify(ctx, err)
	switch f {
	case failedTrap:
		p.counts.traps.Add(1)
	case failedTimeout:
		p.counts.timeouts.Add(1)
	case failedMemory:
		p.counts.ooms.Add(1)
	}
	if f.noted() {
		p.output.note(fmt.Sprintf("tripod: %s: %s", what, shorten(err.Error())))
		p.worker.logger.Debug("a guest has failed", "pod", p.spec.ID, "in", what, "err", shorten(err.Error()))
	}
	return f
}
