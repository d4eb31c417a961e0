package manager

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// TestSession plays the life of a module in the recorded session, from registration to exit.
func TestSession(t *testing.T) {
	r := newRig(t, nil)
	reg := dataOf(t, r.find(t, topics.Reg(runtimeA), 1, isAction(wire.ActionCreate)))
	for name, want := range map[string]any{"type": "runtime", "uuid": runtimeA, "name": "a", "runtime_type": "test/chan",
		"apis": []any{"wasm", "wasi", "channels"}, "max_nmodules": 128.0, "parent": managerID, "platform": "test"} {
		if !reflect.DeepEqual(reg[name], want) {
			t.Errorf("the registration's %s is %v, want %v", name, reg[name], want)
		}
	}
	registers := func(m mqtt.Message) bool { // announcements to scene-scoped peers can come before
		return len(wire.Cut(m.Topic, "realm/proc/reg")) == 1 && isAction(wire.ActionCreate)(m)
	}
	if first := r.first(registers); first.Topic != topics.Reg(managerID) || dataOf(t, first)["type"] != "manager" ||
		dataOf(t, first)["name"] != "node" {
		t.Errorf("the first registration is %s %s, want the manager's", first.Topic, first.Payload)
	}
	r.order(runtimeA, wire.ActionCreate,
		moduleData("m1", "filename", "/srv/hello.wasm", "args", []string{"hello", "x"}, "unknown", map[string]any{"kept": "<&>"}))
	sent := r.a.find(t, true, 0, wire.Create, 1)
	var data map[string]any
	if err := json.Unmarshal(sent.Payload, &data); err != nil || data["index"] != 0.0 || data["uuid"] != "m1" ||
		data["filename"] != "/srv/hello.wasm" ||
		!reflect.DeepEqual(data["unknown"], map[string]any{"kept": "<&>"}) || len(data["args"].([]any)) != 2 {
		t.Errorf("the runtime got %s", sent.Payload)
	}
	r.a.open(t, 0, 0, channel.Write, "$SL/proc/stdio\x00")
	r.a.tell(t, false, 0, 0, "hello argc=2 [x]")
	if m := r.find(t, "realm/proc/stdio/m1", 1, nil); string(m.Payload) != "hello argc=2 [x]" || m.QoS != 0 {
		t.Errorf("the module's output is %q with QoS %d", m.Payload, m.QoS)
	}
	r.a.tell(t, true, 0, wire.ModuleLog, "\xa8started pid=1")
	r.a.tell(t, true, 0, wire.RuntimeLog, "a plain line\x00")
	r.a.tell(t, true, 0, wire.Profile, "\x01\x02")
	for topic, want := range map[string]string{"realm/proc/log/m1": "started pid=1", "realm/proc/log/" + runtimeA: "a plain line",
		"realm/proc/profile/test/m1": "\x01\x02"} {
		if m := r.find(t, topic, 1, nil); string(m.Payload) != want {
			t.Errorf("%s has %q, want %q", topic, m.Payload, want)
		}
	}
	r.a.tell(t, true, 0, wire.Keepalive, `{"children": [0], "uuid": "no", "load": 0.5}`)
	alive := dataOf(t, r.find(t, topics.Keepalive(runtimeA), 1, func(m mqtt.Message) bool { return dataOf(t, m)["load"] != nil }))
	if alive["type"] != "runtime" || alive["uuid"] != runtimeA || alive["name"] != "a" || alive["load"] != 0.5 ||
		!reflect.DeepEqual(alive["children"], []any{0.0}) {
		t.Errorf("the keepalive is %v", alive)
	}
	r.a.tell(t, true, 0, wire.Exited, `{"status": "exited", "exit_code": 3}`)
	if got := r.exitedOf(runtimeA, "m1", 1); !reflect.DeepEqual(got,
		map[string]any{"type": "module", "uuid": "m1", "status": "exited", "exit_code": 3.0}) {
		t.Errorf("exited with %v", got)
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("m2"))
	r.a.find(t, true, 0, wire.Create, 2) // the index is used again
	r.order(runtimeA, wire.ActionDelete, map[string]any{"type": "module", "uuid": "m2"})
	r.a.find(t, true, 0, wire.Delete, 1)
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 137, "reason": "killed"}}`)
	r.exitedOf(runtimeA, "m2", 1)
	will := r.client().config.Will
	r.close()
	r.find(t, topics.Reg(runtimeA), 1, isAction(wire.ActionDelete))
	last := r.find(t, topics.Reg(managerID), 1, isAction(wire.ActionDelete))
	if last.QoS != 2 || will == nil || will.QoS != 2 || will.Topic != topics.Reg(managerID) ||
		!isAction(wire.ActionDelete)(mqtt.Message{Payload: will.Payload}) {
		t.Errorf("the will is %+v", will)
	}
	if !r.a.closed || r.count(isError) != 0 {
		t.Errorf("closed: %v, errors: %d", r.a.closed, r.count(isError))
	}
}
