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

// stable is how long a runtime must have been up for its next loss to be answered at once.
const stable = 10 * time.Second

// stopTimeout bounds the wait for a runtime that was told to stop.
const stopTimeout = 10 * time.Second

// host serves one runtime: it starts it, starts it again, and keeps its modules.
type host struct {
	m    *Manager
	rt   runtime.Runtime
	info runtime.Info

	orders sync.Mutex     // of create and delete: one order at a time, record and tables alike
	calls  sync.WaitGroup // begin and end, which a lost runtime waits for

	byIndex [channel.MaxModules]atomic.Pointer[module]
	desired atomic.Pointer[desired]

	mu       sync.Mutex // of what follows
	byUUID   map[string]*module
	up       bool
	halted   bool
	run      context.Context // ends when the runtime is lost
	cancel   context.CancelFunc
	said     map[string]any             // by Start, for the registration
	own      map[string]json.RawMessage // the runtime's own fields of keepalives
	interval time.Duration              // of keepalives, as the orchestrator says; 0: it has not
	change   chan struct{}              // closed and made anew with every change of the above

	restarts map[string]*restart // of desired modules; guarded by orders

	heard *heard

	report    chan struct{} // one token: the reported state is old
	reconcile chan struct{} // one token: the desired state may not be met
	beat      chan struct{} // one token: send a keepalive now
}

func newHost(m *Manager, rt runtime.Runtime) *host {
	return &host{m: m, rt: rt, info: rt.Info(), heard: newHeard(), byUUID: map[string]*module{}, change: make(chan struct{}), restarts: map[string]*restart{},
		report: make(chan struct{}, 1), reconcile: make(chan struct{}, 1), beat: make(chan struct{}, 1)}
}

func (h *host) start() {
	h.m.wg.Go(guard.Loop(h.m.log, "edge runtime", h.supervise))
	h.m.wg.Go(guard.Loop(h.m.log, "edge runtime", h.reportAll))
	h.m.wg.Go(guard.Loop(h.m.log, "edge runtime", h.reconcileAll))
	h.m.wg.Go(guard.Loop(h.m.log, "edge runtime", h.keepAlive))
	poke(h.reconcile)
}

// poke leaves a token where there is none.
func poke(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// update changes the host's state and wakes those who wait for that.
func (h *host) update(change func()) {
	h.mu.Lock()
	change()
	close(h.change)
	h.change = make(chan struct{})
	h.mu.Unlock()
	poke(h.report)
}

// wait returns once the condition, which is asked under the lock, holds; false: the context has ended before.
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

// supervise starts the runtime, serves it until it is lost, and starts it again, with delays that grow (fault E3).
func (h *host) supervise() {
	m := h.m
	delay := backoff{min: m.config.BackoffMin, max: m.config.BackoffMax}
	for h.wait(m.ctx, func() bool { return !h.halted }) {
		said, err := h.rt.Start(m.ctx)
		if err != nil {
			if m.ctx.Err() == nil {
				m.refuse("runtime-start", "a runtime does not start", "runtime", h.info.Name, "err", err)
			}
			delay.wait(m.ctx)
			continue
		}
		began := time.Now()
		err = h.serve(said)
		if m.ctx.Err() != nil {
			return
		}
		if h.isHalted() {
			m.log.Info("edge: a runtime has stopped", "runtime", h.info.Name)
			continue
		}
		m.counts.lost.WithLabelValues(h.info.Name).Inc()
		m.log.Warn("edge: a runtime is lost", "runtime", h.info.Name, "err", err)
		if time.Since(began) > stable {
			delay.next = 0
		}
		delay.wait(m.ctx)
	}
}

// serve takes the runtime's messages until it is lost.
func (h *host) serve(said map[string]any) error {
	run, cancel := context.WithCancel(h.m.ctx)
	defer cancel()
	h.update(func() { h.up, h.run, h.cancel, h.said, h.own = true, run, cancel, said, nil })
	for _, mod := range h.all() {
		h.begin(mod)
	}
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

// lose tells the end of the modules of a runtime that is lost, and keeps those that are to run for its next start.
func (h *host) lose() {
	h.update(func() { h.up = false })
	h.calls.Wait()
	for _, mod := range h.all() {
		h.mu.Lock()
		was := mod.phase
		if was != ended {
			mod.phase = pending
		}
		gone := mod.record.State == deleting || h.halted
		mod.lost = mod.lost || was == running
		h.mu.Unlock()
		switch {
		case was == ended:
		case gone && !h.info.Durable:
			h.finish(mod, status(codeKilled, "killed", "its runtime has ended"))
		case was == running && !h.info.Durable:
			h.tellLost(mod)
		}
	}
	if h.m.client.Connected() {
		h.m.publish(h.m.ctx, h.m.config.Topics.Reg(h.info.UUID), 2, false, h.m.request(wire.ActionDelete, h.identity()).Bytes())
	}
}

// tellLost tells that a module has ended with its runtime. It stays in the record: the next start creates it again.
func (h *host) tellLost(mod *module) {
	payload := status(codeKilled, "runtime-lost", "the runtime "+h.info.Name+" has gone")
	mod.box.clear()
	h.m.router.CloseModule(h.info.UUID, mod.record.Index)
	if err := h.rt.Cleanup(h.m.ctx, mod.record.Index, mod.uuid); err != nil {
		h.m.refuse("cleanup", "what a lost module leaves cannot be removed now", "module", mod.uuid, "err", err)
	}
	h.mu.Lock()
	mod.lost, mod.known, mod.restored = false, false, true
	h.mu.Unlock()
	h.m.counts.exited.WithLabelValues("runtime-lost").Inc()
	h.m.publish(h.m.ctx, h.m.config.Topics.ControlOf(h.info.UUID), 2, false, h.m.request(wire.ActionExited, h.exitedData(mod.uuid, payload)).Bytes())
}

// halt stops the runtime and its modules until resume (Seed 4, "Stop Runtime").
func (h *host) halt() {
	h.orders.Lock()
	defer h.orders.Unlock()
	var run context.Context
	var cancel context.CancelFunc
	h.update(func() { h.halted, run, cancel = true, h.run, h.cancel })
	for _, mod := range h.all() {
		if err := h.deleteLocked(mod); err != nil {
			h.m.refuse("delete", "a module of a stopped runtime cannot be deleted", "module", mod.uuid, "err", err)
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
			<-ctx.Done() // it ends by itself
		}
	})
}

// resume undoes halt.
func (h *host) resume() { h.update(func() { h.halted = false }); poke(h.reconcile) }

// stayRegistered registers the runtime whenever it is up, as long as the connection lasts.
func (h *host) stayRegistered(ctx context.Context) {
	for h.wait(ctx, func() bool { return h.up }) {
		h.mu.Lock()
		run, said := h.run, h.said
		h.mu.Unlock()
		both, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(run, cancel)
		if h.m.register(both, h.info.UUID, func() json.RawMessage { return h.registration(said) }, h.hear) {
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

// hear takes what the orchestrator answers to the registration.
func (h *host) hear(details json.RawMessage) {
	var d struct {
		Interval float64 `json:"ka_interval_sec"`
	}
	if json.Unmarshal(details, &d) == nil && d.Interval > 0 {
		h.update(func() { h.interval = time.Duration(min(d.Interval, 1e6) * float64(time.Second)) })
	}
}
