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

// kindFinished is the kind of records for the ends of desired modules. A key consists of the runtime's uuid and the
// module's uuid. The value is a restart. Earlier daemons recorded only modules that are not restarted, by their data.
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

// restart is the restart state of a desired module that has ended at least once.
type restart struct {
	Data  []byte          `json:"data"`
	Ended bool            `json:"ended,omitempty"` // the module is not restarted until its data change
	Count int             `json:"count,omitempty"`
	Exit  json.RawMessage `json:"exit,omitempty"` // the status of its last end, as in the reported document

	delay backoff
	after time.Time
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
	err := d.err
	if err == nil {
		if err = h.m.store.Put(kindDesired, h.info.UUID, payload); err != nil {
			err = fmt.Errorf("record the desired document: %w", err)
		}
	}
	if err != nil {
		h.m.fail("desired", wire.Envelope{}, excerpt(payload), err)
		h.update(func() { h.refused = err })
		return
	}
	if desiredRecorded.Hit(h.m.ctx) != nil {
		return
	}
	h.desired.Store(d)
	h.update(func() { h.refused = nil })
	poke(h.reconcile)
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
			r := &restart{}
			if json.Unmarshal(value, r) != nil || len(r.Data) == 0 {
				r = &restart{Data: value, Ended: true}
			}
			r.delay = h.m.restartDelay()
			h.orders.Lock()
			h.restarts[string(uuid)] = r
			h.orders.Unlock()
		}
		return nil
	})
	poke(h.report)
	if err != nil {
		h.m.refuse("record", "cannot read the ends of desired modules", "runtime", h.info.Name, "err", err)
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
	clear(h.problems)
	for _, data := range d.modules {
		wait, err := h.createMissing(data)
		if err != nil {
			h.m.fail("desired", wire.Envelope{}, data.Bytes(), fmt.Errorf("the desired document: %w", err))
			wait = h.m.config.BackoffMax
			h.problems[data.UUID()] = problem{err: err, retryAt: time.Now().Add(wait)}
		}
		if wait > 0 && (next == 0 || wait < next) {
			next = wait
		}
	}
	poke(h.report)
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
		if r.Ended {
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
		if ok && bytes.Equal(r.Data, data.Bytes()) {
			continue
		}
		if err := h.m.store.Delete(kindFinished, h.info.UUID+"/"+uuid); err != nil {
			h.m.refuse("record", "cannot remove the end of a module from the record", "module", uuid, "err", err)
			continue
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
	if r == nil || !bytes.Equal(r.Data, mod.record.Data) {
		r = &restart{Data: mod.record.Data, delay: h.m.restartDelay()}
		h.restarts[mod.uuid] = r
	}
	r.Exit = reportedExit(payload)
	ok, _ := outcome(payload)
	policy := mod.data.Text("restart")
	if policy == wire.RestartNever || policy == wire.RestartOnFailure && ok {
		r.Ended = true
	} else {
		r.Count++
		r.after = time.Now().Add(r.delay.delay())
	}
	raw, err := json.Marshal(r)
	if err == nil {
		err = h.m.store.Put(kindFinished, h.info.UUID+"/"+mod.uuid, raw)
	}
	if err != nil {
		h.m.refuse("record", "cannot record the end of a desired module", "module", mod.uuid, "err", err)
	}
}

func (m *Manager) restartDelay() backoff {
	return backoff{min: m.config.BackoffMin, max: m.config.BackoffMax}
}
