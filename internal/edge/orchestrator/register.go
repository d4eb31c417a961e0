package orchestrator

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// maxSlots bounds max_nmodules. The wide header of channel frames has no room for larger indexes.
const maxSlots = channel.MaxModulesWide

// maxInterval is the maximum of ka_interval_sec: a week, in seconds.
const maxInterval = 7 * 24 * 60 * 60

// register records a manager or runtime as alive, and answers a registration. The namespace is that of a scene-scoped
// runtime, which may register by a keepalive.
func (t *transition) register(id string, e wire.Envelope, namespace string) error {
	d, kind, err := peerData(id, e.Data)
	if err != nil {
		return err
	}
	if kind == Runtime {
		err = t.validRuntime(d)
	}
	if err != nil {
		return err
	}
	r := t.get(key{kind, id})
	if r == nil {
		r, err = t.add(&Record{Kind: kind, UUID: id, Since: t.now, Status: Alive})
	} else {
		r = t.edit(t.enter(r, Alive))
	}
	if err != nil {
		return err
	}
	r.Name, r.Parent, r.Data = d.Text("name"), d.Text("parent"), d.Without("children")
	r.Dialect = Dialect{Later: e.Later(), Scene: namespace}
	if r.Name == "" {
		r.Name = id
	}
	_, promised := number(d, "ka_interval_sec")
	r.Beats = r.Beats || promised || kind == Runtime && r.Parent == ""
	r.Data.Set("ka_interval_sec", t.o.interval(r))
	if kind == Runtime {
		defaults(r.Data, runtimeDefaults)
	}
	if e.Action == wire.ActionUpdate {
		t.o.noteBeat(r.UUID, d)
	} else {
		t.o.noteBeat(r.UUID, nil)
		t.answer(r, e)
	}
	switch {
	case kind != Runtime:
		return nil
	case namespace != "":
		return t.fill() // the first keepalive says which of its modules still run
	}
	return t.restore(r)
}

// answer confirms a registration.
func (t *transition) answer(r *Record, e wire.Envelope) {
	d := wire.ModuleData{"details": r.details().Bytes()}
	d.Set("result", "ok")
	if r.Scene == "" {
		t.publish(t.o.config.Topics.Reg(r.UUID), e.Answer(d.Bytes()))
		return
	}
	e.Action = wire.ActionCreate
	t.publish(t.o.config.Topics.SceneRuntime(r.Scene, r.UUID), t.o.sign(e.Answer(d.Bytes())))
}

// restore handles the return of a runtime. It orders the deletion of the runtime's doomed modules, creates the killed
// ones again, and fills the free slots.
func (t *transition) restore(r *Record) error {
	for _, m := range t.modulesOf(r.UUID) {
		switch {
		case m.Doomed:
			m = t.edit(m)
			m.Doomed = false
			t.sendOrder(m, r, wire.ActionDelete)
		case m.Status == Killed && m.RestartAt == nil:
			if err := t.recreate(m); err != nil {
				return err
			}
		}
	}
	return t.fill()
}

// unregister handles the deregistration or the last will of a manager or runtime. It ignores an unknown peer.
func (t *transition) unregister(id string, raw json.RawMessage) error {
	_, kind, err := peerData(id, raw)
	if err != nil {
		return err
	}
	r := t.get(key{kind, id})
	if r == nil {
		return nil
	}
	return t.loseAll(r)
}

// loseAll marks a manager or runtime as dead. A manager's runtimes and a runtime's modules are lost with it.
func (t *transition) loseAll(r *Record) error {
	r = t.enter(r, Dead)
	if r.Kind == Manager {
		child := func(runtime *Record) bool { return runtime.Parent == r.UUID && runtime.Status == Alive }
		for _, runtime := range t.list(Runtime, child) {
			if err := t.loseAll(runtime); err != nil {
				return err
			}
		}
		return nil
	}
	for _, m := range t.modulesOf(r.UUID) {
		if err := t.loseModule(m); err != nil {
			return err
		}
	}
	return nil
}

func (t *transition) loseModule(m *Record) error {
	switch m.Status {
	case Alive, Exiting:
		m, err := t.move(m, lose)
		if err != nil {
			return err
		}
		if m.Lost = m.Status == Killed; !m.Lost {
			m.Doomed = true // the order to delete the module may not have arrived
			t.notify(m)
		}
		m.Unconfirmed = false
	case Killed:
		t.edit(m).RestartAt = nil
	}
	return nil
}

// heartbeat handles a keepalive. If the peer was marked dead, it was only silent, because after a restart it would have
// registered first. Its modules therefore still run, and are not created again.
func (t *transition) heartbeat(id string, raw json.RawMessage) error {
	d, err := parse(raw)
	if err != nil {
		return err
	}
	if named := d.Text("uuid"); named != "" && named != id {
		return fmt.Errorf("keepalive on the topic of %q with the uuid %q: %w", id, named, errdefs.ErrInvalidArgument)
	}
	r := t.get(key{Runtime, id})
	if r == nil {
		r = t.get(key{Manager, id})
	}
	if r == nil {
		return fmt.Errorf("keepalive of %q, which has not registered: %w", id, errdefs.ErrNotFound)
	}
	t.o.noteBeat(id, d)
	if !r.Beats {
		r = t.edit(r)
		r.Beats = true
	}
	if m := t.get(key{Manager, r.Parent}); m != nil {
		t.enter(m, Alive)
	}
	named, ok := children(d)
	scene := r.Scene != "" && ok
	if r.Status == Alive && !scene {
		return nil
	}
	if r = t.enter(r, Alive); r.Kind != Runtime {
		return nil
	}
	for _, m := range t.modulesOf(id) {
		if m.Status != Killed || !m.Lost || scene && !named[m.UUID] {
			continue // the last: a scene-scoped runtime that was started again
		}
		if _, err := t.move(m, revive); err != nil {
			return err
		}
	}
	if err := t.missing(r, d); err != nil {
		return err
	}
	return t.restore(r)
}

// peerData parses the data of a message on the registration topic of the given peer.
func peerData(id string, raw json.RawMessage) (wire.ModuleData, Kind, error) {
	d, err := parse(raw)
	if err != nil {
		return nil, "", fmt.Errorf("data of a registration: %w", err)
	}
	kind := Kind(d.Text("type"))
	if kind != Manager && kind != Runtime {
		return nil, "", fmt.Errorf("registration of type %q: want manager or runtime: %w", kind, errdefs.ErrInvalidArgument)
	}
	if named := d.Text("uuid"); named != id {
		return nil, "", fmt.Errorf("registration on the topic of %q with the uuid %q: %w", id, named, errdefs.ErrInvalidArgument)
	}
	if err := wire.ValidName("uuid", id); err != nil {
		return nil, "", err
	}
	for _, name := range []string{"name", "parent", "runtime_type"} {
		if raw := d[name]; len(raw) > 0 && string(raw) != "null" && !isText(raw) {
			return nil, "", fmt.Errorf("registration: %q is not a string without NUL: %w", name, errdefs.ErrInvalidArgument)
		}
	}
	return d, kind, nil
}

func isText(raw json.RawMessage) bool {
	var s string
	return json.Unmarshal(raw, &s) == nil && !strings.ContainsRune(s, 0)
}

// validRuntime checks the fields that only runtimes have.
func (t *transition) validRuntime(d wire.ModuleData) error {
	var apis []string
	if raw := d["apis"]; len(raw) > 0 && json.Unmarshal(raw, &apis) != nil {
		return fmt.Errorf(`registration: "apis" is not a list of strings: %w`, errdefs.ErrInvalidArgument)
	}
	for name, most := range map[string]int{"max_nmodules": maxSlots, "ka_interval_sec": maxInterval} {
		raw := d[name]
		if n, ok := number(d, name); len(raw) > 0 && string(raw) != "null" && (!ok || n < 0 || n > most) {
			return fmt.Errorf("registration: %q is not a number from 0 to %d: %w", name, most, errdefs.ErrInvalidArgument)
		}
	}
	if parent := d.Text("parent"); parent != "" && t.get(key{Manager, parent}) == nil {
		return fmt.Errorf("unknown parent %q: no manager with this uuid has registered; register it first: %w", parent, errdefs.ErrNotFound)
	}
	return nil
}
