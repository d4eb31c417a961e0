package manager

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// TestBadOrders is fault E1: each bad order is answered on the error topic, and the next good order is obeyed.
func TestBadOrders(t *testing.T) {
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("live"))
	r.a.find(t, true, 0, wire.Create, 1)
	for i, c := range []struct {
		payload string
		want    string
		retain  bool
	}{
		{payload: `{"action": "create", `, want: "JSON object"},
		{payload: `[1, 2]`, want: "JSON object"},
		{payload: "\xff\xfe", want: "JSON object"},
		{payload: `null`, want: "null"},
		{payload: `{"object_id": "x", "action": "create", "type": "wrong", "data": {}}`, want: "type"},
		{payload: `{"object_id": "x", "action": "create", "type": "arts_req"}`, want: "data"},
		{payload: `{"object_id": "x", "action": "create", "type": "arts_req", "data": "text"}`, want: "JSON object"},
		{payload: `{"object_id": "x", "action": "create", "type": "arts_req", "data": {"uuid": "u"}}`, want: "type"},
		{payload: `{"object_id": "x", "action": "create", "type": "arts_req", "data": {"type": "module"}}`, want: "uuid"},
		{payload: `{"object_id": "x", "action": "create", "type": "arts_req", "data": {"type": "module", "uuid": "a/b"}}`, want: "uuid"},
		{payload: `{"object_id": "x", "action": "dance", "type": "arts_req", "data": {"type": "module", "uuid": "u"}}`, want: "dance"},
		{payload: `{"object_id": "x", "action": "create", "type": "arts_req", "data": {"type": "moon", "uuid": "u"}}`, want: "moon"},
		{payload: `{"object_id": "x", "action": "delete", "type": "arts_req", "data": {"type": "module", "uuid": "nobody"}}`, want: "nobody"},
		{payload: `{"object_id": "x", "action": "delete", "type": "req", "data": {"type": "module"}}`, want: "no such module"},
		{payload: `{"object_id": "d", "action": "create", "type": "arts_req", "data": {"type": "module", "uuid": "live"}}`, want: "live"},
		{payload: `{"object_id": "r", "action": "create", "type": "arts_req", "data": {"type": "module", "uuid": "kept"}}`, want: "retained",
			retain: true},
	} {
		if c.retain { // it is there before the manager connects
			r.client().disconnect()
		}
		r.publish(topics.ControlOf(runtimeA), c.retain, []byte(c.payload))
		if c.retain {
			r.client().inbox <- mqtt.Message{Topic: topics.ControlOf(runtimeA), Payload: []byte(c.payload), Retain: true}
			r.client().connect()
		}
		if got := r.errorWith(i + 1); !strings.Contains(got, c.want) {
			t.Errorf("%s: answered %q, want %q in it", c.payload, got, c.want)
		}
	}
	later := r.find(t, topics.Errors(), 14, isError)
	if e, _ := wire.ParseEnvelope(later.Payload); e.Type != wire.ResponseLater || e.ObjectID != "x" {
		t.Errorf("a later peer's request is answered by %s", later.Payload)
	}
	if n := r.count(isExit("live")); n != 0 {
		t.Errorf("the live module was told exited %d times because of a duplicate, want 0", n)
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("next"))
	r.a.find(t, true, 1, wire.Create, 1)
}

// TestOwnMessages: if a broker sends the manager its own messages on a control topic, they are neither orders nor
// errors.
func TestOwnMessages(t *testing.T) {
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionExited, moduleData("m"))
	r.order(runtimeA, wire.ActionUpdate, moduleData("m"))
	r.publish(topics.ControlOf(runtimeA), false,
		wire.Envelope{ObjectID: "x", Action: wire.ActionCreate, Type: wire.Response, Data: object(moduleData("m"))}.Bytes())
	r.publish(topics.ControlOf(runtimeA), false, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("after"))
	r.a.find(t, true, 0, wire.Create, 1)
	if n := r.count(isError); n != 0 {
		t.Errorf("%d errors, want 0", n)
	}
}

// TestTheSameMessageTwice: a broker can send a message once for each matching filter, or again after a crash.
func TestTheSameMessageTwice(t *testing.T) {
	r := newRig(t, nil)
	create := envelope(wire.ActionCreate, moduleData("m"))
	r.publish(topics.ControlOf(runtimeA), false, create)
	r.publish(topics.ControlOf(runtimeA)+"/"+runtimeA, false, create)
	remove := envelope(wire.ActionDelete, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.publish(topics.ControlOf(runtimeA)+"/"+runtimeA, false, remove)
	r.a.find(t, true, 0, wire.Delete, 1)
	r.a.tell(t, true, 0, wire.Exited, `{}`)
	r.exitedOf(runtimeA, "m", 1)
	r.publish(topics.ControlOf(runtimeA), false, remove)
	r.order(runtimeA, wire.ActionCreate, moduleData("after"))
	r.a.find(t, true, 0, wire.Create, 2)
	if n := r.count(isError); n != 0 {
		t.Errorf("%d errors, want 0", n)
	}
}

// TestCapacity: the 129th module is refused and reported as exited; modules get the lowest free indexes.
func TestCapacity(t *testing.T) {
	r := newRig(t, nil)
	for i := range channel.MaxModules {
		r.order(runtimeA, wire.ActionCreate, moduleData(fmt.Sprint("m", i)))
	}
	r.a.find(t, true, channel.MaxModules-1, wire.Create, 1)
	r.order(runtimeA, wire.ActionCreate, moduleData("extra"))
	if got := r.errorWith(1); !strings.Contains(got, "128 modules") {
		t.Errorf("answered %q, want %q in it", got, "128 modules")
	}
	if got := r.exitedOf(runtimeA, "extra", 1)["status"].(map[string]any); got["code"] != 125.0 {
		t.Errorf("exit of the module that found no room: got %v, want code 125", got)
	}
	r.order(runtimeB, wire.ActionCreate, moduleData("extra")) // the other runtime is not concerned
	r.b.find(t, true, 0, wire.Create, 1)
	for _, index := range []int{77, 5} {
		r.a.tell(t, true, index, wire.Exited, `{}`)
		r.exitedOf(runtimeA, fmt.Sprint("m", index), 1)
	}
	for _, index := range []int{5, 77} {
		r.order(runtimeA, wire.ActionCreate, moduleData(fmt.Sprint("again", index)))
		r.a.find(t, true, index, wire.Create, 2)
	}
	r.order(runtimeB, wire.ActionCreate, moduleData("m0"))
	if got := r.errorWith(2); !strings.Contains(got, "uuid") {
		t.Errorf("the uuid of a module of another runtime: %q", got)
	}
}

// TestExits: metadata are merged; a plain string is passed on; text that is not JSON is reported as such; type and uuid
// cannot be overridden.
func TestExits(t *testing.T) {
	r := newRig(t, nil)
	for i, c := range []struct {
		payload string
		want    map[string]any
	}{
		{`{"status": "exited"}`, map[string]any{"status": "exited"}},
		{`{"status": {"code": 1, "reason": "trap", "message": "unreachable"}, "more": [1]}` + "\x00",
			map[string]any{"status": map[string]any{"code": 1.0, "reason": "trap", "message": "unreachable"}, "more": []any{1.0}}},
		{`{"status": "x", "uuid": "another", "type": "runtime"}`, map[string]any{"status": "x"}},
		{`"exited"`, map[string]any{"status": "exited"}},
		{``, map[string]any{"status": "exited"}},
		{`{"status": `, map[string]any{"status": "exited", "message": "the runtime's metadata is not a JSON object: \"{\\\"status\\\": \""}},
	} {
		uuid := fmt.Sprint("m", i)
		r.order(runtimeA, wire.ActionCreate, moduleData(uuid))
		r.a.find(t, true, 0, wire.Create, i+1)
		r.a.tell(t, true, 0, wire.Exited, c.payload)
		c.want["type"], c.want["uuid"] = "module", uuid
		if got := r.exitedOf(runtimeA, uuid, 1); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: told %v, want %v", c.payload, got, c.want)
		}
	}
	if m := r.find(t, topics.ControlOf(runtimeA), 1, isExit("m0")); m.QoS != 2 {
		t.Errorf("QoS of the exited message: got %d, want 2", m.QoS)
	}
}

// TestBadFramesOfARuntime: messages from a runtime about unknown modules, or of an unknown form, disturb nothing.
func TestBadFramesOfARuntime(t *testing.T) {
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.a.tell(t, true, 99, wire.Exited, `{}`)
	r.a.tell(t, true, 99, channel.OpenChannel, "\x00\x03a")
	r.a.tell(t, false, 99, 0, "nobody")
	r.a.tell(t, true, 0, 77, "what is this")
	r.a.tell(t, true, 0, channel.OpenChannel, "\x00")
	r.a.tell(t, true, 0, channel.CloseChannel, "")
	r.a.tell(t, true, 0, channel.CloseChannel, "\x07")
	r.a.tell(t, true, 0, wire.Keepalive, `[]`)
	r.a.tell(t, true, 0, wire.Keepalive, ``)
	r.a.tell(t, false, 0, 9, "to a channel that is not open")
	r.a.tell(t, true, 0, wire.Exited, `{}`)
	r.exitedOf(runtimeA, "m", 1)
	if n := r.count(isError); n != 0 {
		t.Errorf("%d answers on the error topic for what a runtime said, want 0", n)
	}
}

// TestStopRuntime: stop ends the modules and the runtime, which starts again when it is created.
func TestStopRuntime(t *testing.T) {
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.publish(topics.ControlOf(runtimeA), false, envelope("stop", map[string]any{"type": "runtime", "uuid": runtimeA}))
	r.a.find(t, true, 0, wire.Delete, 1)
	r.a.find(t, true, 0, wire.Stop, 1)
	r.a.kill()
	r.exitedOf(runtimeA, "m", 1)
	r.find(t, topics.Reg(runtimeA), 1, isAction(wire.ActionDelete))
	r.order(runtimeA, wire.ActionCreate, moduleData("late"))
	if got := r.errorWith(1); !strings.Contains(got, "stopped") {
		t.Errorf("a module for a stopped runtime: %q", got)
	}
	r.publish(topics.ControlOf(runtimeA), false, envelope(wire.ActionCreate, map[string]any{"type": "runtime", "uuid": runtimeA}))
	r.find(t, topics.Reg(runtimeA), 2, isAction(wire.ActionCreate))
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 2)
	if n := r.count(isExit("m")); n != 1 {
		t.Errorf("told exited %d times, want 1", n)
	}
}

// TestKeepaliveInterval: keepalives have the configured interval, also if the runtime sends none.
func TestKeepaliveInterval(t *testing.T) {
	r := newRig(t, func(c *Config) { c.KeepAlive = 20 * time.Millisecond })
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.find(t, topics.Keepalive(runtimeA), 3, func(m mqtt.Message) bool {
		return reflect.DeepEqual(dataOf(t, m)["modules"], []any{"m"}) && reflect.DeepEqual(dataOf(t, m)["children"], []any{0.0})
	})
	r.find(t, topics.Keepalive(runtimeB), 3, isAction(wire.ActionUpdate))
}
