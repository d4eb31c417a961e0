package manager

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/failpoint"
)

// kindExit is the kind of records for exits that the broker has not acknowledged. Their keys are random.
const kindExit = "exit"

// exitsPoll is the interval at which the manager checks whether the broker has acknowledged exits. exitsKeep bounds how
// long an acknowledged exit is kept if no orchestrator answers.
const (
	exitsPoll = 250 * time.Millisecond
	exitsKeep = time.Minute
)

// Fail points.
var (
	exitRecorded  = failpoint.New("edge.manager.exited.recorded")
	exitCleaned   = failpoint.New("edge.manager.exited.cleaned")
	exitKept      = failpoint.New("edge.manager.exited.kept")
	exitForgotten = failpoint.New("edge.manager.exited.forgotten")
	exitTold      = failpoint.New("edge.manager.exited.told")
	exitAcked     = failpoint.New("edge.manager.exited.acknowledged")
)

// finish handles the end of a module. Later calls for the same module do nothing.
func (h *host) finish(mod *module, payload []byte) {
	if h.apply(mod, evExit) == settle {
		h.settle(mod, payload)
	}
}

// settle records the exit of an ended module and concludes it, in the background.
func (h *host) settle(mod *module, payload []byte) {
	poke(mod.wake)
	mod.box.clear()
	h.m.wg.Go(func() {
		h.keepLog(mod, payload)
		h.record(mod, payload)
		h.conclude(mod, payload)
	})
}

// record adds an exit to the module's record.
func (h *host) record(mod *module, payload []byte) {
	h.orders.Lock()
	defer h.orders.Unlock()
	h.mu.Lock()
	mod.record.State, mod.record.Exited = recordExited, payload
	r := mod.record
	h.mu.Unlock()
	if err := h.m.put(mod.uuid, r); err != nil {
		h.m.refuse("record", "cannot record an exit", "module", mod.uuid, "err", err)
	}
}

// conclude cleans up after a module whose exit is recorded, frees its index and reports the exit.
func (h *host) conclude(mod *module, payload []byte) {
	m := h.m
	if exitRecorded.Hit(m.ctx) != nil {
		return
	}
	// The index stays in use until the call that creates the module has returned.
	if !h.wait(m.ctx, func() bool { return !mod.launching }) {
		return
	}
	m.router.CloseModule(h.info.UUID, mod.record.Index)
	done := m.retry(m.ctx, func() error {
		err := h.rt.Cleanup(m.ctx, mod.record.Index, mod.uuid)
		if err != nil && m.ctx.Err() == nil {
			m.refuse("cleanup", "cannot clean up after a module", "module", mod.uuid, "err", err)
		}
		if errdefs.IsUnavailable(err) || m.ctx.Err() != nil {
			return err
		}
		return nil
	})
	if !done || exitCleaned.Hit(m.ctx) != nil {
		return
	}
	h.orders.Lock()
	send := m.exits.keep(m, h.exitOf(mod, payload))
	h.scheduleRestart(mod, payload)
	if exitKept.Hit(m.ctx) == nil {
		if err := m.store.Delete(kindModule, mod.uuid); err != nil {
			m.refuse("record", "cannot remove a module from the record", "module", mod.uuid, "err", err)
		}
	}
	h.remove(mod)
	h.orders.Unlock()
	m.counts.exited.WithLabelValues(reasonOf(payload)).Inc()
	m.log.Info("edge: module exited", "runtime", h.info.Name, "module", mod.uuid, "status", string(payload))
	if exitForgotten.Hit(m.ctx) == nil {
		send()
	}
	poke(h.reconcile)
}

// metadata returns the payload of a runtime's exited message as a JSON object. A JSON string becomes the object's
// status; any other payload is quoted in the object's message.
func (h *host) metadata(payload []byte) []byte {
	payload = trimNUL(payload)
	if len(payload) == 0 {
		return []byte(`{"status":"exited"}`)
	}
	if _, err := wire.ParseObject(payload); err == nil {
		return payload
	}
	var plain string
	if json.Unmarshal(payload, &plain) == nil {
		return object(map[string]any{"status": plain})
	}
	h.m.refuse("bad-json", "a runtime's exited message is not JSON", "runtime", h.info.Name, "bytes", len(payload))
	const most = 256
	return object(map[string]any{"status": "exited",
		"message": fmt.Sprintf("the runtime's metadata is not a JSON object: %.*q", most, payload)})
}

// exitedData returns the data of an exited message: the runtime's fields, and the module's type and uuid.
func (h *host) exitedData(uuid string, payload []byte) json.RawMessage {
	fields, _ := wire.ParseObject(payload) // no fields if the payload is not an object
	data := map[string]any{}
	for name, value := range fields {
		data[name] = value
	}
	data["type"], data["uuid"] = "module", uuid
	return object(data)
}

// outcome reports whether an exit was a success, and returns its reason.
func outcome(payload []byte) (ok bool, reason string) {
	var e struct {
		Status   json.RawMessage `json:"status"`
		ExitCode int             `json:"exit_code"`
	}
	var object struct {
		Code   int    `json:"code"`
		Reason string `json:"reason"`
	}
	if json.Unmarshal(payload, &e) != nil {
		return false, "unknown"
	}
	if json.Unmarshal(e.Status, &object) == nil && object.Reason != "" {
		return object.Code == 0 && object.Reason == "exited", object.Reason
	}
	return e.ExitCode == 0, "exited"
}

// reasonOf returns an exit's reason as a metric label. A reason that the protocol does not know becomes "other".
func reasonOf(payload []byte) string {
	_, reason := outcome(payload)
	switch reason {
	case "exited", "killed", "trap", "oom", "deadline", "runtime-lost", reasonCrash:
		return reason
	}
	return "other"
}

// exit is an exit that is to be reported.
type exit struct {
	Runtime string `json:"runtime"`
	UUID    string `json:"uuid"`
	Payload []byte `json:"payload"`
	Scene   string `json:"scene,omitempty"` // of a module of a scene-scoped peer; the next two are for such modules
	Name    string `json:"name,omitempty"`
	Asked   string `json:"asked,omitempty"` // object_id of the request for the deletion; "" if nobody asked

	turn   int       // how often it was sent
	queued bool      // it waits for the client in the manager's queue, or the client has it
	acked  time.Time // when the broker has acknowledged it; zero until then
}

// exits holds the exits that the broker has not acknowledged.
type exits struct {
	mu   sync.Mutex
	all  map[string]exit // by key
	more chan struct{}   // has a token after an exit was added
}

func newExits() *exits { return &exits{all: map[string]exit{}, more: make(chan struct{}, 1)} }

// keep records an exit, and returns the function that sends it.
func (x *exits) keep(m *Manager, e exit) (send func()) {
	key := newID()
	raw, err := json.Marshal(e)
	if err == nil {
		err = m.store.Put(kindExit, key, raw)
	}
	if err != nil {
		m.refuse("record", "cannot record an exit", "module", e.UUID, "err", err)
	}
	x.put(key, e)
	return func() { x.send(m, key) }
}

func (x *exits) put(key string, e exit) {
	x.mu.Lock()
	x.all[key] = e
	x.mu.Unlock()
	poke(x.more)
}

// send queues an exit for the broker, unless that was done before.
func (x *exits) send(m *Manager, key string) {
	x.mu.Lock()
	e, ok := x.all[key]
	if !ok || e.queued {
		x.mu.Unlock()
		return
	}
	e.queued, e.acked = true, time.Time{}
	e.turn++
	x.all[key] = e
	x.mu.Unlock()
	h := m.host(e.Runtime) // never nil: keep and load take only exits of configured runtimes
	topic, payload := h.exitMessage(e)
	m.out.send(topic, 2, payload, func(err error) {
		if err == nil {
			err = exitTold.Hit(m.ctx)
		}
		if err != nil {
			x.change(key, e.turn, func(e *exit) { e.queued = false })
		}
	}, func(delivered bool) {
		x.change(key, e.turn, func(e *exit) {
			if e.queued = delivered; delivered {
				e.acked = time.Now()
			}
		})
	})
}

// change changes an exit, unless it has been sent again since the given turn.
func (x *exits) change(key string, turn int, change func(*exit)) {
	x.mu.Lock()
	if e, ok := x.all[key]; ok && e.turn == turn {
		change(&e)
		x.all[key] = e
	}
	x.mu.Unlock()
	poke(x.more)
}

// sendAll sends all exits that have not been sent, such as those of an earlier daemon. Call it before registering, so
// that the orchestrator does not create the ended modules again.
func (x *exits) sendAll(m *Manager) {
	x.mu.Lock()
	keys := slices.Collect(maps.Keys(x.all))
	x.mu.Unlock()
	for _, key := range keys {
		x.send(m, key)
	}
}

// repeat sends all exits, also those that have been sent.
func (x *exits) repeat(m *Manager) {
	x.mu.Lock()
	for key, e := range x.all {
		e.queued, e.acked = false, time.Time{}
		x.all[key] = e
	}
	x.mu.Unlock()
	x.sendAll(m)
}

// run returns a loop that removes exits once the broker has acknowledged them.
func (x *exits) run(m *Manager) func() {
	return func() {
		for {
			select {
			case <-x.more:
			case <-m.ctx.Done():
				return
			}
			for x.settle(m) > 0 && m.ctx.Err() == nil {
				pause(m.ctx, exitsPoll, nil)
			}
		}
	}
}

// settle removes the exits that the broker has acknowledged, once an orchestrator has answered or exitsKeep is over, and sends
// those again that the client has dropped. An exit that is still in the client's queue stays in the record, however long it
// has been there, because the queue is in memory. settle returns the number of remaining exits.
func (x *exits) settle(m *Manager) int {
	now, connected, registered := time.Now(), m.client.Connected(), m.registered.Load()
	var acknowledged, dropped []string
	x.mu.Lock()
	for key, e := range x.all {
		switch {
		case !e.acked.IsZero() && (registered || now.Sub(e.acked) > exitsKeep):
			delete(x.all, key)
			acknowledged = append(acknowledged, key)
		case e.turn > 0 && !e.queued && connected:
			dropped = append(dropped, key)
		}
	}
	left := len(x.all)
	x.mu.Unlock()
	for _, key := range dropped {
		x.send(m, key)
	}
	for _, key := range acknowledged {
		if exitAcked.Hit(m.ctx) != nil {
			return left
		}
		if err := m.store.Delete(kindExit, key); err != nil {
			m.refuse("record", "cannot remove an exit from the record", "err", err)
		}
	}
	return left
}

// load reads the exits of an earlier daemon. It leaves an exit whose runtime is not configured in the record.
func (x *exits) load(m *Manager) error {
	return m.store.All(kindExit, func(key string, value []byte) error {
		var e exit
		if err := json.Unmarshal(value, &e); err != nil {
			m.refuse("record", "unreadable exit in the record", "err", err)
			return nil
		}
		if m.host(e.Runtime) == nil {
			m.refuse("record", "recorded exit of a runtime that is not configured", "module", e.UUID, "runtime", e.Runtime)
			return nil
		}
		x.put(key, e)
		return nil
	})
}
