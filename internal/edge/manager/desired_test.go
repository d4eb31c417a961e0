package manager

import (
	"encoding/json"
	"testing"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// desire publishes the desired document of a runtime.
func (r *rig) desire(rt string, generation int, modules ...map[string]any) {
	r.publish(topics.Desired(rt), true, object(map[string]any{"generation": generation, "modules": modules}))
}

func (r *rig) states(rt string, generation string, want map[string]string) {
	r.t.Helper()
	r.find(r.t, topics.Reported(rt), 1, func(m mqtt.Message) bool {
		var got reported
		if json.Unmarshal(m.Payload, &got) != nil || !m.Retain || string(got.Generation) != generation || len(got.Modules) != len(want) {
			return false
		}
		for _, mod := range got.Modules {
			if want[mod.UUID] != mod.State {
				return false
			}
		}
		return true
	})
}

// TestDesiredState: new modules of the document are created, removed ones deleted and changed ones replaced; modules of
// another origin do not change.
func TestDesiredState(t *testing.T) {
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("other"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.desire(runtimeA, 1, moduleData("d1"), moduleData("d2", "args", []string{"a"}))
	r.a.find(t, true, 1, wire.Create, 1)
	r.a.find(t, true, 2, wire.Create, 1)
	r.states(runtimeA, "1", map[string]string{"other": "running", "d1": "running", "d2": "running"})
	r.desire(runtimeA, 2, moduleData("d2", "args", []string{"b"}))
	r.a.find(t, true, 1, wire.Delete, 1)
	r.a.find(t, true, 2, wire.Delete, 1)
	r.a.tell(t, true, 1, wire.Exited, `{}`)
	r.a.tell(t, true, 2, wire.Exited, `{}`)
	r.exitedOf(runtimeA, "d1", 1)
	r.exitedOf(runtimeA, "d2", 1)
	if again := r.a.find(t, true, -1, wire.Create, 4); again.Module == 0 {
		t.Errorf("created again at %d", again.Module)
	}
	r.states(runtimeA, "2", map[string]string{"other": "running", "d2": "running"})
	r.publish(topics.Desired(runtimeA), true, nil) // the document is gone
	r.a.find(t, true, -1, wire.Delete, 3)
	if n := r.count(isError); n != 0 {
		t.Errorf("%d errors, want 0", n)
	}
}

// TestDesiredPoison: an invalid document is answered even if it is retained, and the previous one stays in force.
func TestDesiredPoison(t *testing.T) {
	r := newRig(t, nil)
	r.desire(runtimeA, 1, moduleData("d"))
	r.a.find(t, true, 0, wire.Create, 1)
	for i, poison := range []string{`{`, `[]`, `{"modules": 7}`, `{"modules": [{"name": "without uuid"}]}`, `{"modules": [{"uuid": "x"}, {"uuid": "x"}]}`, `{"modules": [null]}`} {
		r.publish(topics.Desired(runtimeA), true, []byte(poison))
		r.errorWith(i + 1)
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("after"))
	r.a.find(t, true, 1, wire.Create, 1)
	if n := r.a.count(true, wire.Delete); n != 0 {
		t.Errorf("%d modules deleted, want 0", n)
	}
}

// TestDesiredRestart: modules restart according to their policy. A module that is not restarted stays ended after a
// restart of the daemon. None of this needs a broker.
func TestDesiredRestart(t *testing.T) {
	r := newRig(t, nil)
	r.desire(runtimeA, 1, moduleData("always"), moduleData("failure", "restart", "on-failure"), moduleData("never", "restart", "never"))
	for i := range 3 {
		r.a.find(t, true, i, wire.Create, 1)
	}
	ok, bad := `{"status": {"code": 0, "reason": "exited"}}`, `{"status": {"code": 1, "reason": "trap"}}`
	r.a.tell(t, true, 0, wire.Exited, ok)
	r.a.find(t, true, 0, wire.Create, 2)
	r.a.tell(t, true, 1, wire.Exited, bad)
	r.a.find(t, true, 1, wire.Create, 2)
	r.a.tell(t, true, 1, wire.Exited, ok)
	r.exitedOf(runtimeA, "failure", 2)
	r.a.tell(t, true, 2, wire.Exited, bad)
	r.exitedOf(runtimeA, "never", 1)
	r.states(runtimeA, "1", map[string]string{"always": "running"})
	r.close()
	r.set(func(b *bus) { b.away = true })
	r.open()
	r.a.find(t, true, 0, wire.Create, 3)
	r.client().connect()
	r.desire(runtimeA, 2, moduleData("always"), moduleData("failure", "restart", "on-failure", "args", []string{"new"}), moduleData("never", "restart", "never"))
	r.a.find(t, true, 1, wire.Create, 3) // other data: it is another module
	r.states(runtimeA, "2", map[string]string{"always": "running", "failure": "running"})
	if n := r.a.count(true, wire.Create); n != 7 {
		t.Errorf("%d creates, want 7", n)
	}
}
