package manager

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/guard"
)

// stable is how long a runtime must run for its restart delay to be reset.
const stable = 10 * time.Second

// stopTimeout bounds the wait for a runtime to stop.
const stopTimeout = 10 * time.Second

// host serves one runtime. It starts and restarts the runtime, and owns the runtime's modules.
type host struct {
	m    *Manager
	rt   runtime.Runtime
	info runtime.Info

	orders sync.Mutex     // serializes create and delete, in the record and in the tables
	calls  sync.WaitGroup // running launchers and deletions; lose waits for them

	byIndex [channel.MaxModules]atomic.Pointer[module]
	desired atomic.Pointer[desired]

	mu              sync.Mutex // guards the fields below, up to the field called change
	byUUID          map[string]*module
	up              bool
	halted          bool
	run             context.Context // ends when the runtime is lost
	cancel          context.CancelFunc
	extra           map[string]any             // what Start returned, for the registration
	keepaliveFields map[string]json.RawMessage // fields of the runtime's last keepalive
	interval        time.Duration              // between keepalives, as the orchestrator says; 0 if unknown
	suspects        suspects
	refused         error         // why the latest desired document was refused; nil if it was accepted
	change          chan struct{} // closed and replaced with every change of these fields

	announced atomic.Bool // a scene-scoped peer has confirmed the runtime's registration on this connection

	restarts map[string]*restart // of desired modules; the mutex orders guards it and problems
	problems map[string]problem  // of desired modules that could not be recorded at the latest attempt

	recent *recentMessages

	report    chan struct{} // has a token when the reported state may have changed
	reconcile chan struct{} // has a token when the modules may differ from the desired document
	beat      chan struct{} // has a token when a keepalive is due now
}

func newHost(m *Manager, rt runtime.Runtime) *host {
	return &host{m: m, rt: rt, info: rt.Info(), recent: newRecentMessages(), byUUID: map[string]*module{}, change: make(chan struct{}),
		restarts: map[string]*restart{}, problems: map[string]problem{},
		suspects: newSuspects(),
		report:   make(chan struct{}, 1), reconcile: make(chan struct{}, 1), beat: make(chan struct{}, 1)}
}

func (h *host) start() {
	h.m.wg.Go(guard.Loop(h.m.log, "edge runtime", h.supervise))
	h.m.wg.Go(guard.Loop(h.m.log, "edge runtime", h.reportAll))
	h.m.wg.Go(guard.Loop(h.m.log, "edge runtime", h.reconcileAll))
	h.m.wg.Go(guard.Loop(h.m.log, "edge runtime", h.keepAlive))
	poke(h.reconcile)
}

// poke puts a token into the channel, unless there is one already.
func poke(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// update changes the host's state under mu, and wakes waiters.
func (h *host) update(change func()) {
	h.mu.Lock()
	change()
	close(h.change)
	h.change = make(chan struct{})
	h.mu.Unlock()
	poke(h.report)
}

// wait waits until condition, which is called with mu held, returns true. It reports false if the context ends first.
func (h *host) wait(ctx context.Context, condition func() bool) bool {
	for {
		h.mu.Lock()
		ok, changed := condition(), h.change
		h.mu.Unlock()
		if ok {
			return ctx.Err() == nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

func (h *host) isUp() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.up
}

func (h *host) isHalted() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.halted
}

// supervise starts the runtime and serves it until it is lost. Then it starts the runtime again, with growing delays.
func (h *host) supervise() {
	m := h.m
	delay := backoff{min: m.config.BackoffMin, max: m.config.BackoffMax}
	for h.wait(m.ctx, func() bool { return !h.halted }) {
		extra, err := h.rt.Start(m.ctx)
		if err != nil {
			if m.ctx.Err() == nil {
				m.refuse("runtime-start", "cannot start a runtime", "runtime", h.info.Name, "err", err)
			}
			delay.wait(m.ctx)
			continue
		}
		began := time.Now()
		err = h.serve(extra)
		if m.ctx.Err() != nil {
			return
		}
		if h.isHalted() {
			m.log.Info("edge: runtime stopped", "runtime", h.info.Name)
			continue
		}
		m.counts.lost.WithLabelValues(h.info.Name).Inc()
		m.log.Warn("edge: runtime lost", "runtime", h.info.Name, "err", err)
		if time.Since(began) > stable {
			delay.next = 0
		}
		delay.wait(m.ctx)
	}
}

// serve receives the runtime's messages until the runtime is lost.
func (h *host) serve(extra map[string]any) error {
	run, cancel := context.WithCancel(h.m.ctx)
	defer cancel()
	h.update(func() { h.up, h.run, h.cancel, h.extra, h.keepaliveFields = true, run, cancel, extra, nil })
	for _, mod := range h.all() {
		h.applyAndLaunch(mod, evUp)
	}
	h.admit()
	h.controlRun(run)
	var err error
	for {
		var msg channel.Message
		if msg, err = h.rt.Receive(run); err != nil {
			break
		}
		h.receive(msg)
	}
	cancel()
	if h.m.ctx.Err() == nil {
		h.lose()
	}
	return err
}

// lose handles the loss or the end of the runtime: it moves the modules to their next states, and unregisters the
// runtime.
func (h *host) lose() {
	h.update(func() { h.up = false })
	h.calls.Wait()
	e := evDied
	switch {
	case h.info.Durable:
		e = evDetached
	case h.isHalted():
		e = evStopped
		h.forgetTrials()
	default:
		h.countLoss()
	}
	for _, mod := range h.all() {
		switch h.apply(mod, e) {
		case settle:
			h.settle(mod, status(wire.CodeKilled, "killed", "its runtime has ended"))
		case reportLost:
			h.reportLost(mod)
		}
	}
	if h.m.client.Connected() {
		h.m.publish(h.m.ctx, h.m.config.Topics.Reg(h.info.UUID), 2, false, h.m.request(wire.ActionDelete, h.identity()).Bytes())
		h.announce(h.m.ctx, wire.ActionDelete)
	}
	h.announced.Store(false)
}

// reportLost reports that a module has ended with its runtime. The module stays in the record and is created again.
func (h *host) reportLost(mod *module) {
	payload := status(wire.CodeKilled, "runtime-lost", "the runtime "+h.info.Name+" was lost")
	mod.box.clear()
	h.keepLog(mod, payload)
	h.m.router.CloseModule(h.info.UUID, mod.record.Index)
	if err := h.rt.Cleanup(h.m.ctx, mod.record.Index, mod.uuid); err != nil {
		h.m.refuse("cleanup", "cannot clean up after a lost module", "module", mod.uuid, "err", err)
	}
	h.mu.Lock()
	mod.repeatable = true
	h.mu.Unlock()
	h.m.counts.exited.WithLabelValues("runtime-lost").Inc()
	if mod.record.Origin == fromScene {
		return // for its peers, the module ends when the runtime ends it
	}
	h.m.publish(h.m.ctx, h.m.config.Topics.ControlOf(h.info.UUID), 2, false,
		h.m.request(wire.ActionExited, h.exitedData(mod.uuid, payload)).Bytes())
}

// halt stops the runtime and its modules. The runtime stays stopped until resume.
func (h *host) halt() {
	h.orders.Lock()
	defer h.orders.Unlock()
	var run context.Context
	var cancel context.CancelFunc
	h.update(func() { h.halted, run, cancel = true, h.run, h.cancel })
	for _, mod := range h.all() {
		if err := h.deleteLocked(mod); err != nil {
			h.m.refuse("delete", "cannot delete a module of a stopped runtime", "module", mod.uuid, "err", err)
		}
	}
	if run == nil {
		return
	}
	h.m.wg.Go(func() {
		defer cancel()
		ctx, stop := context.WithTimeout(run, stopTimeout)
		defer stop()
		if err := h.rt.Stop(ctx); err != nil {
			return
		}
		h.wait(ctx, func() bool { return len(h.byUUID) == 0 })
		if !h.info.Durable {
			<-ctx.Done() // until Receive fails because the runtime has ended, or until stopTimeout has passed
		}
	})
}

// resume undoes halt.
func (h *host) resume() { h.update(func() { h.halted = false }); poke(h.reconcile) }

// stayAnnounced announces the runtime to scene-scoped peers whenever the runtime comes up, until the connection ends.
func (h *host) stayAnnounced(ctx context.Context) {
	h.announced.Store(false)
	for h.wait(ctx, func() bool { return h.up }) {
		h.keepScenes(ctx)
		h.mu.Lock()
		run := h.run
		h.mu.Unlock()
		if !h.wait(ctx, func() bool { return !h.up || h.run != run }) {
			return
		}
	}
}

// stayRegistered registers the runtime whenever the runtime comes up, until the connection ends.
func (h *host) stayRegistered(ctx context.Context) {
	for h.wait(ctx, func() bool { return h.up }) {
		h.mu.Lock()
		run, extra := h.run, h.extra
		h.mu.Unlock()
		both, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(run, cancel)
		if h.m.register(both, h.info.UUID, func() json.RawMessage { return h.registration(extra) }, h.accept) {
			h.m.log.Info("edge: runtime registered", "runtime", h.info.Name, "uuid", h.info.UUID)
			poke(h.report)
			poke(h.beat)
			<-both.Done()
		}
		stop()
		cancel()
		if !h.wait(ctx, func() bool { return !h.up || h.run != run }) {
			return
		}
	}
}

// accept takes the keepalive interval from the orchestrator's answer to the registration.
func (h *host) accept(details json.RawMessage) {
	var d struct {
		Interval float64 `json:"ka_interval_sec"`
	}
	if json.Unmarshal(details, &d) == nil && d.Interval > 0 {
		h.update(func() { h.interval = time.Duration(min(d.Interval, 1e6) * float64(time.Second)) })
	}
}
