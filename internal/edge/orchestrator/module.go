package orchestrator

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// create takes a module into the record and places it. An error has changed nothing.
func (t *transition) create(raw json.RawMessage, later bool) error {
	m, err := t.newModule(raw)
	if err != nil {
		return err
	}
	m.Later = later
	if m.Wanted = m.Data.Parent(); m.Wanted != "" {
		r, err := t.runtimeFor(m.Wanted)
		if err != nil {
			return err
		}
		m.Wanted = r.UUID
	} else if _, err := t.choose(m.wantedAPIs()); err != nil {
		return err
	}
	if m, err = t.add(m); err != nil {
		return err
	}
	return t.settle(m)
}

// newModule reads the data of a module that is to be made.
func (t *transition) newModule(raw json.RawMessage) (*Record, error) {
	d, err := moduleData(raw)
	if err != nil {
		return nil, err
	}
	if err := d.Validate(); err != nil {
		return nil, err
	}
	before := t.get(key{Module, d.UUID()})
	if before != nil && before.Status != Dead {
		return nil, fmt.Errorf("duplicate module UUID; request ignored: %w", errdefs.ErrAlreadyExists)
	}
	m := &Record{Kind: Module, UUID: d.UUID(), Name: d.Name(), Since: t.now, Choosy: len(d.APIs()) > 0, Data: maps.Clone(d)}
	if m.Name == "" {
		m.Name = m.UUID
	}
	defaults(m.Data, moduleDefaults)
	return m, nil
}

// maxData bounds the data of a message about one module, runtime or manager, in bytes: they stay in memory.
const maxData = 1 << 20

// parse reads the data of a message.
func parse(raw json.RawMessage) (wire.ModuleData, error) {
	if len(raw) > maxData {
		return nil, fmt.Errorf("data of %d bytes: at most %d are taken; request ignored: %w", len(raw), maxData, errdefs.ErrInvalidArgument)
	}
	return wire.ParseObject(raw)
}

// moduleData reads the data of a message about a module.
func moduleData(raw json.RawMessage) (wire.ModuleData, error) {
	d, err := parse(raw)
	if err != nil {
		return nil, err
	}
	switch kind := text(d, "type"); {
	case kind == "":
		return nil, fmt.Errorf(`a module's data: "type" is missing: %w`, errdefs.ErrInvalidArgument)
	case kind != string(Module):
		return nil, fmt.Errorf("data of type %q: this topic is about modules: %w", kind, errdefs.ErrInvalidArgument)
	}
	return d, wire.ValidName("uuid", d.UUID())
}

// adopt takes a module into the record that a client has asked the manager for, past the orchestrator.
func (t *transition) adopt(runtime string, e wire.Envelope) error {
	m, err := t.newModule(e.Data)
	if errdefs.IsAlreadyExists(err) {
		return errIgnored // an order of ours that came back, or a second one, which the manager answers
	}
	if err != nil {
		return err
	}
	r, err := t.runtimeFor(runtime)
	if err != nil {
		return err
	}
	m.Later, m.Wanted, m.Order = isLater(e), r.UUID, e.ObjectID
	if m, err = t.add(m); err != nil {
		return err
	}
	if m, err = t.move(m, place); err == nil {
		m.Parent = r.UUID
	}
	return err
}

// remove has a module deleted.
func (t *transition) remove(raw json.RawMessage) error {
	d, err := moduleData(raw)
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
		t.tell(m, r, wire.ActionDelete)
	}
	return nil
}

// removed notes that a client has asked the manager to delete a module, past the orchestrator.
func (t *transition) removed(raw json.RawMessage) error {
	d, err := moduleData(raw)
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

// exited notes the end of a module, and has it created again if its policy says so.
func (t *transition) exited(runtime string, raw json.RawMessage) error {
	d, err := moduleData(raw)
	if err != nil {
		return err
	}
	m := t.get(key{Module, d.UUID()})
	switch {
	case m == nil:
		return errIgnored // it was desired of its manager (Topics.Desired), or the record has been lost
	case m.Parent != runtime:
		return fmt.Errorf("exited: module %s is of the runtime %q, and not of %q: %w", m.UUID, m.Parent, runtime, errdefs.ErrInvalidArgument)
	case m.Status == Dead || m.Status == Killed && !m.Lost:
		return nil // told twice, as QoS 1 may
	}
	ending := readExit(d)
	e, ranFor := exit, t.now.Sub(m.Since)
	comesBack := m.Status != Exiting && (ending.lost || ending.restarts(m.Data))
	if comesBack {
		e = again
	}
	m, err = t.move(m, e)
	if err != nil {
		return fmt.Errorf("exited: module %s: %w", d.UUID(), err)
	}
	m.Exit, m.Lost, m.Doomed, m.Untold = ending.raw, false, false, false
	t.notify(m)
	if comesBack && !ending.lost {
		t.backOff(m, ranFor)
	}
	return t.fill()
}

// notify tells everybody that a module has ended, as the recorded orchestrator does.
func (t *transition) notify(m *Record) {
	t.publish(t.o.config.Topics.Notif(), request(wire.ActionExited, m.message(wire.ActionExited), m.Later))
}

// restart creates the modules again whose back-off has ended.
func (t *transition) restart() error {
	due := func(m *Record) bool { return m.Status == Killed && m.RestartAt != nil && !m.RestartAt.After(t.now) }
	for _, m := range t.list(Module, due) {
		m = t.edit(m)
		m.Order = "" // another life
		if err := t.comeBack(m); err != nil {
			return err
		}
	}
	return nil
}

// comeBack creates a killed module again in its own slot, or lets it wait for its runtime. After a loss it is the order of before,
// with its object_id: a manager on which the module has gone on, or which has brought it back by itself, knows it by that.
func (t *transition) comeBack(m *Record) error {
	r := t.get(key{Runtime, m.Parent})
	if r == nil || r.Status != Alive {
		t.edit(m).RestartAt = nil
		return nil
	}
	mates := slices.DeleteFunc(t.modulesOf(r.UUID), func(x *Record) bool { return !x.Status.holds() || x.UUID == m.UUID || x.Number > m.Number })
	if len(mates) < r.slots() {
		return t.order(m, r)
	}
	m, err := t.move(m, wait)
	if err == nil {
		m.Parent = m.Wanted
	}
	return err
}
