package orchestrator

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// runtimeFor looks up the runtime that a client asked for, by uuid or name.
func (t *transition) runtimeFor(wanted string) (*Record, error) {
	if r := t.runtimeNamed(wanted); r != nil {
		return t.requireAlive(r)
	}
	return nil, fmt.Errorf("unknown parent %q: no runtime with this uuid or name has registered; request ignored: %w", wanted,
		errdefs.ErrNotFound)
}

// runtimeNamed returns the runtime with this uuid or name, dead or alive, or nil.
func (t *transition) runtimeNamed(wanted string) *Record {
	if r := t.get(key{Runtime, wanted}); r != nil {
		return r
	}
	return youngest(t.list(Runtime, func(r *Record) bool { return r.Name == wanted }), anyRecord)
}

func (t *transition) requireAlive(r *Record) (*Record, error) {
	if r.Status != Alive {
		return nil, fmt.Errorf("the runtime %s (%q) is dead; request ignored: create the module once the runtime has registered again: %w",
			r.UUID, r.Name, errdefs.ErrUnavailable)
	}
	return r, nil
}

// used counts the occupied slots, by runtime.
func (t *transition) used() map[string]int {
	n := t.o.state.slots()
	for k, r := range t.changes {
		count(n, t.o.state.get(k), -1)
		count(n, r, +1)
	}
	return n
}

// choose returns the runtime with the most free slots among the living runtimes that can run the module. It returns nil if
// all of these runtimes are full, and errdefs.ErrNotFound if there are none.
func (t *transition) choose(m *Record) (*Record, error) {
	var best *Record
	var most int
	used, able := t.used(), t.list(Runtime, func(r *Record) bool { return r.Status == Alive && offers(r, m) })
	for _, r := range able {
		if free := r.slots() - used[r.UUID]; free > most {
			best, most = r, free
		}
	}
	if len(able) == 0 {
		return nil, fmt.Errorf("no living runtime offers %q and runs files of type %q; request ignored: %w", m.wantedAPIs(), m.Data.FileType(),
			errdefs.ErrNotFound)
	}
	return best, nil
}

// offers reports whether the runtime offers the APIs that the module's client asked for, and runs the module's file type.
// Python needs an API like "python:python3". A runtime with such an API runs Wasm if it names an API of Wasm, too.
func offers(r, m *Record) bool {
	have := r.Data.APIs()
	starts := func(prefix string) bool {
		return slices.ContainsFunc(have, func(api string) bool { return strings.HasPrefix(api, prefix) })
	}
	runs := !starts("python") || starts("wasm") || starts("wasi")
	if m.Data.FileType() == "PY" {
		runs = starts("python")
	}
	return runs && !slices.ContainsFunc(m.wantedAPIs(), func(api string) bool { return !slices.Contains(have, api) })
}

// settle places a module on a runtime with a free slot, or queues it.
func (t *transition) settle(m *Record) error {
	var r *Record
	var err error
	if m.Wanted != "" {
		r = t.get(key{Runtime, m.Wanted})
		if r != nil && (r.Status != Alive || r.slots() <= t.used()[r.UUID]) {
			r = nil
		}
	} else if r, err = t.choose(m); err != nil && m.Status == unborn {
		return err
	}
	if r == nil {
		if m.Status == Queued {
			return nil
		}
		m, err := t.move(m, wait)
		if err == nil {
			m.Parent = m.Wanted
		}
		return err
	}
	return t.order(m, r)
}

// wantedAPIs returns the APIs that the client asked for. The default APIs do not restrict the choice of a runtime.
func (r *Record) wantedAPIs() []string {
	if !r.WantsAPIs {
		return nil
	}
	return r.Data.APIs()
}

// order asks the runtime's manager to create the module.
func (t *transition) order(m, r *Record) error {
	m, err := t.move(m, place)
	if err != nil {
		return err
	}
	m.Parent, m.Direct = r.UUID, false
	t.sendOrder(m, r, wire.ActionCreate)
	return nil
}

// sendOrder sends the runtime's manager an order about the module, and records the order in the module's record m. The
// caller must have got m from edit.
func (t *transition) sendOrder(m, r *Record, action string) {
	topic, e := t.o.orderTo(m, r, action)
	if action == wire.ActionCreate && m.Order != "" {
		e.ObjectID = m.Order
	}
	if action == wire.ActionDelete && m.Asked != "" && r.Scene != "" {
		e.ObjectID = m.Asked // the runtime answers the client
	}
	m.Order, m.Unconfirmed = e.ObjectID, true
	t.publish(topic, e)
}

// message returns the data of a message about the module.
func (r *Record) message(action string) wire.ModuleData {
	if action == wire.ActionCreate {
		return r.order()
	}
	d := wire.ModuleData{}
	d.Set("type", Module)
	d.Set("uuid", r.UUID)
	return d
}

// fill gives free slots to queued modules, oldest first.
func (t *transition) fill() error {
	free := t.free()
	if len(free) == 0 {
		return nil
	}
	for _, m := range t.list(Module, func(m *Record) bool { return m.Status == Queued }) {
		if m.Wanted != "" && free[m.Wanted] == 0 {
			continue
		}
		if err := t.settle(m); err != nil {
			return err
		}
		if t.get(key{Module, m.UUID}).Status == Queued {
			continue
		}
		if free = t.free(); len(free) == 0 {
			return nil
		}
	}
	return nil
}

// free counts the free slots of living runtimes. Full runtimes are left out.
func (t *transition) free() map[string]int {
	n, used := map[string]int{}, t.used()
	for _, r := range t.list(Runtime, func(r *Record) bool { return r.Status == Alive && r.slots() > used[r.UUID] }) {
		n[r.UUID] = r.slots() - used[r.UUID]
	}
	return n
}
