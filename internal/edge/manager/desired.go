package manager

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/failpoint"
)

// kindFinished is the kind of records for desired modules that have ended and are not restarted. A key consists of the
// runtime's uuid and the module's uuid. The value is the module's data.
const kindFinished = "finished"

var desiredRecorded = failpoint.New("edge.manager.desired.recorded")

// desired is a desired document: the modules that the runtime should run.
//
//	{"generation": …, "modules": [{"uuid": …, "restart": "always|on-failure|never", …}]}
type desired struct {
	generation json.RawMessage
	modules    []wire.ModuleData
	err        error // if set, the document is refused
}

// restart is the restart state of a desired module.
type restart struct {
	count int
	delay backoff
	after time.Time
	ended bool // the module is not restarted until its data change
	data  []byte
}

// parseDesired parses a document. If one module is invalid, the whole document is refused.
func parseDesired(payload []byte) *desired {
	d := &desired{}
	if len(trimNUL(payload)) == 0 {
		return d
	}
	fields, err := wire.ParseObject(payload)
	if err != nil {
		return &desired{err: fmt.Errorf("the desired document: %w", err)}
	}
	d.generation = fields["generation"]
	var list []wire.ModuleData
	if err := json.Unmarshal(fields["modules"], &list); err != nil {
		return &desired{err: fmt.Errorf("the desired document: %q is not a list of modules: %w", "modules", errdefs.ErrInvalidArgument)}
	}
	seen := map[string]bool{}
	for i, data := range list {
		err := data.Validate()
		if err == nil && seen[data.UUID()] {
			err = fmt.Errorf("the uuid %s is used twice: %w", data.UUID(), errdefs.ErrInvalidArgument)
		}
		if err != nil {
			return &desired{err: fmt.Errorf("the desired document, module %d: %w", i, err)}
		}
		seen[data.UUID()] = true
	}
	d.modules = list
	return d
}

// setDesired accepts a document. It answers a bad document on the error topic; the previous document stays in force.
func (h *host) setDesired(payload []byte) {
	d := parseDesired(payload)
	if d.err != nil {
		h.m.fail("desired", wire.Envelope{}, excerpt(payload), d.err)
		return
	}
	if err := h.m.store.Put(kindDesired, h.info.UUID, payload); err != nil {
		h.m.fail("desired", wire.Envelope{}, excerpt(payload), fmt.Errorf("record the desired document: %w", err))
		return
	}
	if desiredRecorded.Hit(h.m.ctx) != nil {
		return
	}
	h.desired.Store(d)
	poke(h.reconcile)
	poke(h.report)
}

// reconcileAll makes the modules match the document whenever either has changed.
func (h *host) reconcileAll() {
	h.loadFinished()
	for {
		select {
		case <-h.reconcile:
		case <-h.m.ctx.Done():
			return
		}
		if d := h.desired.Load(); d != nil && d.err == nil {
			if wait := h.reconcileOnce(d); wait > 0 {
				time.AfterFunc(wait, func() { poke(h.reconcile) })
			}
		}
	}
}

func (h *host) loadFinished() {
	prefix := h.info.UUID + "/"
	err := h.m.store.All(kindFinished, func(key string, value []byte) error {
		if uuid, ok := bytes.CutPrefix([]byte(key), []byte(prefix)); ok {
			h.orders.Lock()
			h.restarts[string(uuid)] = &restart{ended: true, data: value}
			h.orders.Unlock()
		}
		return nil
	})
	if err != nil {
		h.m.refuse("record", "cannot read the finished modules", "runtime", h.info.Name, "err", err)
	}
}

// reconcileOnce deletes modules that are no longer desired, and creates missing ones. It returns the delay before the
// next attempt; 0 means that the next change triggers it.
func (h *host) reconcileOnce(d *desired) time.Duration {
	h.orders.Lock()
	defer h.orders.Unlock()
	wanted := map[string]wire.ModuleData{}
	for _, data := range d.modules {
		wanted[data.UUID()] = data
	}
	h.forgetFinished(wanted)
	for _, mod := range h.all() {
		if data, ok := wanted[mod.uuid]; mod.record.Origin == fromDesired && (!ok || !bytes.Equal(data.Bytes(), mod.record.Data)) {
			if err := h.deleteLocked(mod); err != nil {
				h.m.refuse("delete", "cannot delete a module that is no longer desired", "module", mod.uuid, "err", err)
			}
		}
	}
	var next time.Duration
	for _, data := range d.modules {
		wait, err := h.createMissing(data)
		if err != nil {
			h.m.fail("desired", wire.Envelope{}, data.Bytes(), fmt.Errorf("the desired document: %w", err))
			wait = h.m.config.BackoffMax
		}
		if wait > 0 && (next == 0 || wait < next) {
			next = wait
		}
	}
	return next
}

// createMissing creates a desired module if it does not exist and has not finished. It returns what remains of the
// module's restart delay, if anything.
func (h *host) createMissing(data wire.ModuleData) (time.Duration, error) {
	h.mu.Lock()
	mod, halted := h.byUUID[data.UUID()], h.halted
	h.mu.Unlock()
	if mod != nil || halted {
		return 0, nil
	}
	if r := h.restarts[data.UUID()]; r != nil {
		if r.ended {
			return 0, nil
		}
		if wait := time.Until(r.after); wait > 0 {
			return wait, nil
		}
	}
	return 0, h.createLocked("", fromDesired, data)
}

// forgetFinished drops the restart state of modules that are no longer in the document, or whose data have changed.
func (h *host) forgetFinished(wanted map[string]wire.ModuleData) {
	for uuid, r := range h.restarts {
		data, ok := wanted[uuid]
		if ok && bytes.Equal(r.data, data.Bytes()) {
			continue
		}
		if r.ended {
			if err := h.m.store.Delete(kindFinished, h.info.UUID+"/"+uuid); err != nil {
				h.m.refuse("record", "cannot remove a finished module from the record", "module", uuid, "err", err)
				continue
			}
		}
		delete(h.restarts, uuid)
	}
}

// scheduleRestart decides whether and when an ended desired module is restarted. A module without a restart policy is
// always restarted. The caller holds h.orders.
func (h *host) scheduleRestart(mod *module, payload []byte) {
	if mod.record.Origin != fromDesired {
		return
	}
	r := h.restarts[mod.uuid]
	if r == nil || !bytes.Equal(r.data, mod.record.Data) {
		r = &restart{data: mod.record.Data, delay: backoff{min: h.m.config.BackoffMin, max: h.m.config.BackoffMax}}
		h.restarts[mod.uuid] = r
	}
	ok, _ := outcome(payload)
	policy := mod.data.Text("restart")
	if policy == wire.RestartNever || policy == wire.RestartOnFailure && ok {
		r.ended = true
		if err := h.m.store.Put(kindFinished, h.info.UUID+"/"+mod.uuid, r.data); err != nil {
			h.m.refuse("record", "cannot record the end of a desired module", "module", mod.uuid, "err", err)
		}
		return
	}
	r.count++
	r.after = time.Now().Add(r.delay.delay())
}

// reported is the retained document that describes the state of a runtime.
type reported struct {
	Type       string           `json:"type"`
	UUID       string           `json:"uuid"`
	Name       string           `json:"name"`
	Up         bool             `json:"up"`
	Generation json.RawMessage  `json:"generation,omitempty"` // of the desired document in force
	Modules    []reportedModule `json:"modules"`
}

type reportedModule struct {
	UUID     string `json:"uuid"`
	Name     string `json:"name"`
	Index    int    `json:"index"`
	State    string `json:"state"` // state.reported
	Origin   string `json:"origin"`
	Restarts int    `json:"restarts"`
}

// reportAll publishes the reported state as a retained message whenever it changes. It publishes nothing while the
// broker is not connected.
func (h *host) reportAll() {
	var last []byte
	for {
		select {
		case <-h.report:
		case <-h.m.ctx.Done():
			return
		}
		if !h.m.client.Connected() {
			last = nil
			continue
		}
		raw, err := json.Marshal(h.reportNow())
		if err != nil || bytes.Equal(raw, last) {
			continue
		}
		last = raw
		h.m.publish(h.m.ctx, h.m.config.Topics.Reported(h.info.UUID), 1, true, raw)
	}
}

func (h *host) reportNow() reported {
	h.orders.Lock()
	defer h.orders.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	r := reported{Type: "runtime", UUID: h.info.UUID, Name: h.info.Name, Up: h.up, Modules: []reportedModule{}}
	if d := h.desired.Load(); d != nil {
		r.Generation = d.generation
	}
	for _, mod := range h.all() {
		one := reportedModule{UUID: mod.uuid, Name: mod.data.Name(), Index: mod.record.Index, State: mod.state.reported(), Origin: mod.record.Origin}
		if r := h.restarts[mod.uuid]; r != nil {
			one.Restarts = r.count
		}
		r.Modules = append(r.Modules, one)
	}
	return r
}
