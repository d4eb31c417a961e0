package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/redis"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// program is a server or a command that runs in a pod.
type program interface {
	// start returns once the server accepts requests or the command runs. It takes ownership of the sockets that it
	// uses, and sets them to nil in the spec.
	start() error
	// stop asks the program to end. The caller calls stop once, on a separate goroutine. If the program does not end in
	// time, the end of pod.alive kills the program.
	stop()
	// wait returns once the program has ended.
	wait() exit
	updateTLS(workerapi.TLS) error
	updateLimits(workerapi.Limits) error
	metrics() []workerapi.MethodMetrics
}

// exit is the exit status of a program.
type exit struct {
	code    int32
	reason  string
	message string
}

// Exit codes of killed programs: 128 plus the signal that would have killed a process.
const (
	exitTrap = 134 // SIGABRT
	exitKill = 137 // SIGKILL
)

// Exit reasons, as in the CRI.
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
	stdin    *stdin        // nil without standard input
	egress   *podEgress    // nil if guests may not call out
	store    wasi.Store    // nil without a store for wasi:keyvalue
	redis    *redis.Client // the store, if it is a server
	channels *channels     // nil without channels
	messages *messages     // nil without channels
	account  *engine.Account
	program  program
	counts   counts

	snapshots     snapshotter
	preparing     sync.WaitGroup           // snapshotter.prepare
	profiler      atomic.Pointer[profiler] // nil except in a test of the component
	preopens      []engine.Preopen
	configVolumes []string    // paths of directories, for wasi:config
	blobs         *wasi.Blobs // nil without a volume for wasi:blobstore

	lifecycle sync.Mutex // held while the pod starts
	started   bool       // guarded by lifecycle

	// alive ends with the cause errStopping when the grace period expires or the pod has exited. Everything that runs
	// in the pod then ends.
	alive context.Context
	kill  context.CancelCauseFunc
	done  chan struct{} // closed once the pod has exited

	mu       sync.Mutex
	status   workerapi.Status
	stopping bool
	deadline *time.Timer // fires when the grace period expires
	killAt   time.Time
}

// counts holds a pod's counters.
type counts struct {
	active                          atomic.Int64
	requests, traps, timeouts, ooms atomic.Uint64
}

func makePod(w *Worker, spec workerapi.PodSpec, c *code) *pod {
	p := &pod{worker: w, spec: spec, code: c, done: make(chan struct{})}
	p.alive, p.kill = context.WithCancelCause(context.Background())
	p.status = workerapi.Status{ID: spec.ID, Component: spec.Component, Digest: spec.Digest, State: workerapi.StateRunning,
		StartedAt: time.Now()}
	p.snapshots.pod, p.snapshots.patience = p, snapshotPatience
	p.preopens, p.configVolumes = preopens(spec.Mounts), configVolumes(spec.Mounts)
	p.blobs = blobs(spec.Mounts)
	p.channels = newChannels(spec, w.router, w.daemon)
	if p.channels != nil {
		p.messages = &messages{channels: p.channels, open: map[string]*portResource{}}
	}
	p.account = engine.NewAccount(uint64(spec.Resources.MemoryBytes))
	p.account.Within(w.account)
	p.account.Bound(engine.HeldFiles, spec.Holdings.Files)
	p.account.Bound(engine.HeldResources, spec.Holdings.Handles)
	p.account.Bound(engine.HeldBytes, spec.Holdings.HostBytes)
	setCPU(p.account, spec.Resources)
	switch c.World {
	case engine.WorldCommand:
		p.program = newCommand(p)
	case engine.WorldMessages:
		p.program = newSubscriber(p)
	default:
		p.program = newServer(p)
	}
	return p
}

func setCPU(a *engine.Account, r workerapi.Resources) {
	period := cmp.Or(r.CPUPeriod, 100_000) // the kernel's default for cpu.max
	a.SetCPU(time.Duration(r.CPUQuota)*time.Microsecond, time.Duration(period)*time.Microsecond)
}

// start starts the program. If start fails, it releases everything. The caller holds p.lifecycle.
func (p *pod) start() error {
	p.output = newOutput(p.spec.Log.File, p.worker.config.LogSizeMax, p.spec.TTY)
	p.spec.Log.File = nil
	if p.channels != nil {
		p.channels.losses.report = p.reportLoss
	}
	if p.spec.Stdin {
		p.stdin = newStdin(p.spec.StdinOnce)
	}
	err := errors.Join(p.openEgress(), p.openStore())
	if err == nil {
		err = p.program.start()
	}
	if err != nil {
		p.kill(errStopping)
		p.release()
		p.mu.Lock()
		p.status.State = workerapi.StateExited // so that the pod can be started again
		p.mu.Unlock()
		close(p.done)
		return err
	}
	p.started = true
	p.preparing.Go(func() { p.snapshots.prepare(p.alive, p.spec.Limits) })
	go p.watch()
	return nil
}

// watch waits for the program to end, and publishes its exit.
func (p *pod) watch() {
	e := p.program.wait()
	p.kill(errStopping)
	p.preparing.Wait()
	p.release()
	p.mu.Lock()
	if p.deadline != nil {
		p.deadline.Stop()
	}
	p.status.State, p.status.FinishedAt = workerapi.StateExited, time.Now()
	p.status.ExitCode, p.status.Reason, p.status.Message = e.code, e.reason, e.message
	status := p.status
	p.mu.Unlock()
	p.worker.logger.Info("pod exited", "pod", p.spec.ID, "component", p.spec.Component, "code", e.code, "reason", e.reason, "message",
		e.message)
	p.worker.config.Publish(workerapi.Event{Exited: &status})
	close(p.done)
}

// release closes the pod's resources. Call it once the pod's guests have ended.
func (p *pod) release() {
	p.snapshots.close()
	if p.stdin != nil {
		p.stdin.end()
	}
	if p.redis != nil {
		p.redis.Close()
	}
	if p.egress != nil {
		p.egress.close()
	}
	if p.channels != nil {
		p.channels.close()
		p.channels.losses.end()
		if n := p.channels.dropped(); n > 0 {
			p.output.logLine(fmt.Sprintf("tripod: dropped %d channel messages that the daemon or the component did not read in time", n))
		}
	}
	p.output.end()
	p.spec.CloseFiles()
}

// reportLoss writes dropped channel messages to the pod's log and to the worker's.
func (p *pod) reportLoss(l loss, messages int) {
	p.output.logLine(fmt.Sprintf("tripod: dropped %d messages of channel %q (topic %q) that the %s did not read in time", messages, l.channel,
		l.topic, l.reader))
	p.worker.logger.Warn("channel messages dropped", "pod", p.spec.ID, "component", p.spec.Component, "channel", l.channel, "topic", l.topic,
		"reader", l.reader, "messages", messages)
}

// drain waits until the clients of an ended pod have read its output, or until ctx ends.
func (p *pod) drain(ctx context.Context) {
	p.lifecycle.Lock()
	output := p.output
	p.lifecycle.Unlock()
	if output != nil {
		output.drain(ctx)
	}
}

// stop stops the program, and kills it when the grace period expires. A later call can only shorten the grace period.
func (p *pod) stop(grace time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.status.State == workerapi.StateExited {
		return
	}
	if grace <= 0 {
		p.kill(errStopping) // before the program can exit by itself
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
	p.status.Quick = !p.code.optimised.Load()
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
		if used := p.account.Memory(); r.MemoryBytes > 0 && used > uint64(r.MemoryBytes) {
			return fmt.Errorf("memory limit of %d bytes: the component's instances use %d; wait until they use less, or stop them: %w",
				r.MemoryBytes, used, errdefs.ErrFailedPrecondition)
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
			Sockets: p.egress.sockets(),
		},
		Snapshot: p.snapshots.state(),
	}
	s.Connections, s.Rejected = p.connections()
	if p.channels != nil {
		s.ChannelDropped = p.channels.dropped()
	}
	return s
}

// connections returns the number of open connections, and for each reason the number of connections that were refused
// or forcibly closed.
func (p *pod) connections() (open int, rejected map[string]uint64) {
	p.lifecycle.Lock() // start sets s.plane
	defer p.lifecycle.Unlock()
	s, ok := p.program.(*server)
	if !ok || s.plane == nil {
		return 0, nil
	}
	stats := s.plane.Stats()
	return stats.Connections + stats.QUICConnections, stats.Rejected
}

func (p *pod) logDropped() uint64 {
	p.lifecycle.Lock() // start sets p.output
	defer p.lifecycle.Unlock()
	if p.output == nil {
		return 0
	}
	return p.output.dropped.Load()
}

func (p *pod) metrics() workerapi.Metrics {
	return workerapi.Metrics{ID: p.spec.ID, Component: p.spec.Component, Methods: p.program.metrics()}
}

// count counts a guest's failure and logs its cause.
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
	if f.logged() {
		p.output.logLine(fmt.Sprintf("tripod: %s: %s", what, shorten(err.Error())))
		p.worker.logger.Debug("guest failed", "pod", p.spec.ID, "in", what, "err", shorten(err.Error()))
	}
	return f
}
