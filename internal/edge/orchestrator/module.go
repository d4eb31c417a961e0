package orchestrator

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// create records a module and places it. If order is not empty, it is the object_id of the order to the runtime. After an
// error, nothing has changed.
func (t *transition) create(raw json.RawMessage, order string, client Dialect) error {
	m, err := t.newModule(raw)
	if err != nil {
		return err
	}
	m.Order, m.Dialect = order, client
	if m.Wanted = m.Data.Parent(); m.Wanted != "" {
		r, err := t.runtimeFor(m.Wanted)
		if err != nil {
			return err
		}
		m.Wanted = r.UUID
	} else if _, err := t.choose(m); err != nil {
		return err
	}
	if m, err = t.add(m); err != nil {
		return err
	}
	return t.settle(m)
}

// newModule makes the record of a module from the data of a create message.
func (t *transition) newModule(raw json.RawMessage) (*Record, error) {
	d, err := moduleData(wire.ActionCreate, raw)
	if err != nil {
		return nil, err
	}
	if err := d.Validate(); err != nil {
		return nil, err
	}
	if old := t.get(key{Module, d.UUID()}); old != nil && old.Status != Dead {
		return nil, fmt.Errorf("duplicate module UUID; request ignored: %w", errdefs.ErrAlreadyExists)
	}
	m := &Record{Kind: Module, UUID: d.UUID(), Name: d.Name(), Since: t.now, WantsAPIs: len(d.APIs()) > 0, Data: maps.Clone(d)}
	if m.Name == "" {
		m.Name = m.UUID
	}
	defaults(m.Data, moduleDefaults)
	return m, nil
}

// maxData bounds the data of a module, runtime or manager, in bytes, because these data stay in memory.
const maxData = 1 << 20

// parse parses the data of a message.
func parse(raw json.RawMessage) (wire.ModuleData, error) {
	if len(raw) > maxData {
		return nil, fmt.Errorf("data of %d bytes: the limit is %d; request ignored: %w", len(raw), maxData, errdefs.ErrInvalidArgument)
	}
	return wire.ParseObject(raw)
}

// moduleData parses the data of a message about a module.
func moduleData(action string, raw json.RawMessage) (wire.ModuleData, error) {
	d, err := parse(raw)
	if err != nil {
		return nil, err
	}
	switch kind := d.Kind(action); {
	case kind == "":
		return nil, fmt.Errorf(`data of a module: "type" is missing: %w`, errdefs.ErrInvalidArgument)
	case kind != string(Module):
		return nil, fmt.Errorf("data of type %q: this topic is for modules: %w", kind, errdefs.ErrInvalidArgument)
	}
	return d, wire.ValidName("uuid", d.UUID())
}

// adopt handles a create order that a client sent directly to a manager.
func (t *transition) adopt(runtime string, e wire.Envelope, client Dialect) error {
	m, err := t.newModule(e.Data)
	if errdefs.IsAlreadyExists(err) {
		return errIgnored // our own order, or a duplicate, which the manager refuses
	}
	if err != nil {
		return err
	}
	r, err := t.runtimeFor(runtime)
	if err != nil {
		return err
	}
	m.Dialect, m.Direct, m.Wanted, m.Order = client, client.Scene != "", r.UUID, e.ObjectID
	if m, err = t.add(m); err != nil {
		return err
	}
	if m, err = t.move(m, place); err == nil {
		m.Parent = r.UUID
	}
	return err
}

// remove orders the deletion of a module.
func (t *transition) remove(raw json.RawMessage) error {
	d, err := moduleData(wire.ActionDelete, raw)
	if err != nil {
		return err
	}
	m := t.get(key{Module, d.UUID()})
	if m == nil {
		return fmt.Errorf("unknown module %q; request ignored: %w", d.UUID(), errdefs.ErrNotFound)
	}
	lost := m.Lost
	m, err = t.move(m, remove)
	if err != nil {
		return fmt.Errorf("module %s cannot be deleted; request ignored: %w", d.UUID(), err)
	}
	if m.Status == Dead {
		m.Doomed = lost
		t.notify(m)
		return t.fill()
	}
	if r := t.get(key{Runtime, m.Parent}); r != nil {
		t.sendOrder(m, r, wire.ActionDelete)
	}
	return nil
}

// removed handles a delete order that a client sent directly to a module's manager.
func (t *transition) removed(raw json.RawMessage) error {
	d, err := moduleData(wire.ActionDelete, raw)
	if err != nil {
		return err
	}
	m := t.get(key{Module, d.UUID()})
	if m == nil || m.Status != Alive {
		return nil
	}
	_, err = t.move(m, remove)
	return err
}

// exited records the end of a module, and schedules a restart if the module's policy says so. The runtime is "" if the
// message does not say which one reports.
func (t *transition) exited(runtime string, raw json.RawMessage) error {
	d, err := moduleData(wire.ActionExited, raw)
	if err != nil {
		return err
	}
	m := t.get(key{Module, d.UUID()})
	switch {
	case m == nil:
		return errIgnored // created by a desired document (Topics.Desired), or the record was lost
	case runtime != "" && m.Parent != runtime:
		return fmt.Errorf("exited: module %s belongs to the runtime %q, not to %q: %w", m.UUID, m.Parent, runtime, errdefs.ErrInvalidArgument)
	case m.Status == Dead || m.Status == Killed && !m.Lost:
		return nil // a duplicate, for example from a manager that uses QoS 1
	}
	ending := readExit(d)
	e, ranFor := exit, t.now.Sub(m.Since)
	restarts := m.Status != Exiting && (ending.lost || ending.restarts(m.Data))
	if restarts {
		e = restart
	}
	m, err = t.move(m, e)
	if err != nil {
		return fmt.Errorf("exited: module %s: %w", d.UUID(), err)
	}
	m.Exit, m.Lost, m.Doomed, m.Unconfirmed = ending.raw, false, false, false
	t.notify(m)
	if restarts && !ending.lost {
		t.backOff(m, ranFor)
	}
	return t.fill()
}

// notify publishes that a module has ended.
func (t *transition) notify(m *Record) {
	t.publish(t.o.config.Topics.Notif(), request(wire.ActionExited, m.message(wire.ActionExited), m.Later))
	t.notifyClient(m)
}

// restartDue creates modules again after their back-off.
func (t *transition) restartDue() error {
	due := func(m *Record) bool { return m.Status == Killed && m.RestartAt != nil && !m.RestartAt.After(t.now) }
	for _, m := range t.list(Module, due) {
		m = t.edit(m)
		m.Order = "" // a restart is a new order
		if err := t.recreate(m); err != nil {
			return err
		}
	}
	return nil
}

// recreate creates a killed module again in its old slot. If its runtime is not alive, the module waits for the
// runtime. If the runtime now has too few slots, the module is queued. After a loss, the order has the object_id of the
// previous order, so that the manager recognizes a module that never stopped or that it has already recreated.
func (t *transition) recreate(m *Record) error {
	r := t.get(key{Runtime, m.Parent})
	if r == nil || r.Status != Alive {
		t.edit(m).RestartAt = nil
		return nil
	}
	neighbours := slices.DeleteFunc(t.modulesOf(r.UUID),
		func(x *Record) bool { return !x.Status.holds() || x.UUID == m.UUID || x.Number > m.Number })
	if len(neighbours) < r.slots() {
		return t.order(m, r)
	}
	m, err := t.move(m, wait)
	if err == nil {
		m.Parent = m.Wanted
	}
	return err
}
