package manager

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/failpoint"
)

// kindExit is the kind of the records of exits that the broker has not acknowledged, by a key of their own.
const kindExit = "exit"

// exitsPoll is how often it is looked whether the broker has acknowledged everything; exitsKeep how long an exit is kept on a
// connection that never comes to rest.
const (
	exitsPoll = 250 * time.Millisecond
	exitsKeep = time.Minute
)

// Lines at which the daemon may die.
var (
	exitRecorded  = failpoint.New("edge.manager.exited.recorded")
	exitCleaned   = failpoint.New("edge.manager.exited.cleaned")
	exitKept      = failpoint.New("edge.manager.exited.kept")
	exitForgotten = failpoint.New("edge.manager.exited.forgotten")
	exitTold      = failpoint.New("edge.manager.exited.told")
	exitAcked     = failpoint.New("edge.manager.exited.acknowledged")
)

// finish ends a module, once.
func (h *host) finish(mod *module, payload []byte) {
	if h.apply(mod, evExit) == settle {
		h.settle(mod, payload)
	}
}

// settle records the exit of a module that has ended, and concludes it.
func (h *host) settle(mod *module, payload []byte) {
	poke(mod.nudge)
	mod.box.clear()
	h.m.wg.Go(func() {
		h.record(mod, payload)
		h.conclude(mod, payload)
	})
}

// record records the exit.
func (h *host) record(mod *module, payload []byte) {
	h.orders.Lock()
	defer h.orders.Unlock()
	h.mu.Lock()
	mod.record.State, mod.record.Exited = recordExited, payload
	r := mod.record
	h.mu.Unlock()
	if err := h.m.put(mod.uuid, r); err != nil {
		h.m.refuse("record", "an exit cannot be recorded", "module", mod.uuid, "err", err)
	}
}

// conclude cleans up after a module whose exit is recorded, frees its index and reports the exit.
func (h *host) conclude(mod *module, payload []byte) {
	m := h.m
	if exitRecorded.Hit(m.ctx) != nil {
		return
	}
	// Its index stays taken until the call that creates it has returned.
	if !h.wait(m.ctx, func() bool { return !mod.launching }) {
		return
	}
	m.router.CloseModule(h.info.UUID, mod.record.Index)
	done := m.retry(m.ctx, func() error {
		err := h.rt.Cleanup(m.ctx, mod.record.Index, mod.uuid)
		if err != nil && m.ctx.Err() == nil {
			m.refuse("cleanup", "what a module leaves cannot be removed", "module", mod.uuid, "err", err)
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
	told := m.exits.keep(m, exit{Runtime: h.info.UUID, UUID: mod.uuid, Payload: payload})
	h.leftDesired(mod, payload)
	if exitKept.Hit(m.ctx) == nil {
		if err := m.store.Delete(kindModule, mod.uuid); err != nil {
			m.refuse("record", "a module cannot be taken out of the record", "module", mod.uuid, "err", err)
		}
	}
	h.remove(mod)
	h.orders.Unlock()
	m.counts.exited.WithLabelValues(reasonOf(payload)).Inc()
	m.log.Info("edge: module exited", "runtime", h.info.Name, "module", mod.uuid, "status", string(payload))
	if exitForgotten.Hit(m.ctx) == nil {
		told()
	}
	poke(h.reconcile)
}

// metadata reads what a runtime says with an exit: the fields of an object; a plain string is its status; what is no JSON is told
// as such (Seed 4, "Module Exited").
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
	h.m.refuse("bad-json", "a runtime tells an exit in what is no JSON", "runtime", h.info.Name, "bytes", len(payload))
	const most = 256
	return object(map[string]any{"status": "exited", "message": fmt.Sprintf("the runtime's metadata is no JSON object: %.*q", most, payload)})
}

// exitedData is the data of an exited message: the runtime's fields, and who has ended.
func (h *host) exitedData(uuid string, payload []byte) json.RawMessage {
	fields, err := wire.ParseObject(payload)
	if err != nil {
		fields = map[string]json.RawMessage{}
	}
	data := map[string]any{}
	for name, value := range fields {
		data[name] = value
	}
	data["type"], data["uuid"] = "module", uuid
	return object(data)
}

// outcome reads the status of an exit: whether it was a success, and its reason.
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

// reasonOf is an exit's reason as a label: those of the protocol, or "other".
func reasonOf(payload []byte) string {
	_, reason := outcome(payload)
	switch reason {
	case "exited", "killed", "trap", "oom", "deadline", "runtime-lost":
		return reason
	}
	return "other"
}

// exit is an exit that is to be told.
type exit struct {
	Runtime string `json:"runtime"`
	UUID    string `json:"uuid"`
	Payload []byte `json:"payload"`

	told time.Time // when the client has taken it; zero: not yet
}

// exits are those that the broker may not have.
type exits struct {
	mu   sync.Mutex
	all  map[string]exit // by key
	more chan struct{}   // one token
}

func newExits() *exits { return &exits{all: map[string]exit{}, more: make(chan struct{}, 1)} }

// keep records an exit; the function returned tells it.
func (x *exits) keep(m *Manager, e exit) (tell func()) {
	key := newID()
	raw, err := json.Marshal(e)
	if err == nil {
		err = m.store.Put(kindExit, key, raw)
	}
	if err != nil {
		m.refuse("record", "an exit cannot be recorded", "module", e.UUID, "err", err)
	}
	x.put(key, e)
	return func() { x.tellOne(m, key) }
}

func (x *exits) put(key string, e exit) {
	x.mu.Lock()
	x.all[key] = e
	x.mu.Unlock()
	poke(x.more)
}

// tellOne sends an exit that was not sent in this connection or queued before.
func (x *exits) tellOne(m *Manager, key string) {
	x.mu.Lock()
	e, ok := x.all[key]
	if !ok || !e.told.IsZero() {
		x.mu.Unlock()
		return
	}
	e.told = time.Now()
	x.all[key] = e
	x.mu.Unlock()
	h := m.host(e.Runtime)
	if h == nil {
		return
	}
	m.out.send(m.config.Topics.ControlOf(e.Runtime), 2, m.request(wire.ActionExited, h.exitedData(e.UUID, e.Payload)).Bytes(), func(err error) {
		if err == nil {
			err = exitTold.Hit(m.ctx)
		}
		if err != nil {
			e.told = time.Time{}
			x.put(key, e)
		}
	})
}

// tell tells what was not told before, exits of an earlier daemon. It comes before the registration: the orchestrator is not to
// create those modules again.
func (x *exits) tell(m *Manager) {
	x.mu.Lock()
	keys := make([]string, 0, len(x.all))
	for key := range x.all {
		keys = append(keys, key)
	}
	x.mu.Unlock()
	for _, key := range keys {
		x.tellOne(m, key)
	}
}

// run forgets exits once the broker has acknowledged them.
func (x *exits) run(m *Manager) func() {
	return func() {
		for {
			select {
			case <-x.more:
			case <-m.ctx.Done():
				return
			}
			for x.forget(m) > 0 && m.ctx.Err() == nil {
				sleep(m.ctx, exitsPoll)
			}
		}
	}
}

// forget takes out of the record what was told before the client's queue was empty; it returns how many are left.
func (x *exits) forget(m *Manager) int {
	now := time.Now()
	stats := m.client.Stats()
	rest := m.client.Connected() && stats.Queued == 0
	x.mu.Lock()
	var keys []string
	for key, e := range x.all {
		if !e.told.IsZero() && now.Sub(e.told) > exitsPoll && (rest || m.client.Connected() && now.Sub(e.told) > exitsKeep) {
			keys = append(keys, key)
			delete(x.all, key)
		}
	}
	left := len(x.all)
	x.mu.Unlock()
	for _, key := range keys {
		if exitAcked.Hit(m.ctx) != nil {
			return left
		}
		if err := m.store.Delete(kindExit, key); err != nil {
			m.refuse("record", "an exit cannot be taken out of the record", "err", err)
		}
	}
	return left
}

// load reads the exits of an earlier daemon.
func (x *exits) load(m *Manager) error {
	return m.store.All(kindExit, func(key string, value []byte) error {
		var e exit
		if err := json.Unmarshal(value, &e); err != nil {
			m.refuse("record", "a recorded exit cannot be read", "err", err)
			return nil
		}
		x.put(key, e)
		return nil
	})
}
