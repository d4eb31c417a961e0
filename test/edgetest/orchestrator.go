package edgetest

import (
	"encoding/json"
	"maps"
	"strings"
	"sync"
)

// Orchestrator imitates the public orchestrator and its peculiarities. The later one refuses an exit of the seed's type, so
// that the module stays in its record. It receives its own messages, so it sees each of
// its create orders again and reports a duplicate. It sends a create order to the request's topic with the runtime's
// uuid appended. A module's uuid can never be used again.
type Orchestrator struct {
	realm string
	later bool
	peer  *Peer

	mu    sync.Mutex
	known map[string]object // managers, runtimes, modules by uuid
}

// StartOrchestrator connects an orchestrator: the seed's, or a later one, which uses the types "req" and "resp".
func StartOrchestrator(url, realm string, later bool) (*Orchestrator, error) {
	peer, err := Dial(PeerOptions{URL: url, ID: "edgetest-orchestrator", Plain: true})
	if err != nil {
		return nil, err
	}
	o := &Orchestrator{realm: realm, later: later, peer: peer, known: map[string]object{}}
	for filter, handler := range map[string]func(Line, envelope){realm + "/proc/reg/+": o.registration, ctl(realm) + "/#": o.control} {
		if err := peer.Subscribe(filter, func(l Line) {
			var e envelope
			if json.Unmarshal(l.Payload, &e) == nil && e.request() {
				handler(l, e)
			}
		}); err != nil {
			peer.Close()
			return nil, err
		}
	}
	return o, nil
}

// kind returns the type of the orchestrator's requests.
func (o *Orchestrator) kind() string { return kind(o.later) }

// answer returns the type of its responses, whatever the type of the request.
func (o *Orchestrator) answer() string { return strings.Replace(o.kind(), "req", "resp", 1) }

// Close disconnects the orchestrator.
func (o *Orchestrator) Close() { o.peer.Close() }

// Delete asks the runtime to delete a module.
func (o *Orchestrator) Delete(runtime, uuid string) error {
	return o.peer.Publish(ctlOf(o.realm, runtime), 2, Message("", "delete", o.kind(), object{"type": "module", "uuid": uuid}))
}

func (o *Orchestrator) registration(l Line, e envelope) {
	uuid := lastLevel(l.Topic)
	if e.Action == "delete" {
		o.mu.Lock()
		delete(o.known, uuid)
		o.mu.Unlock()
		return
	}
	if e.Action != "create" {
		return
	}
	details := object{"uuid": uuid, "name": e.Data["name"], "status": "A"}
	if e.Data["type"] == "runtime" {
		maps.Copy(details, object{
			"apis": e.Data["apis"], "runtime_type": e.Data["runtime_type"], "ka_interval_sec": 60, "max_nmodules": 100, "page_size": 65536,
			"aot_target": object{}, "metadata": nil, "platform": nil, "parent": e.Data["parent"],
		})
		if n := e.Data["max_nmodules"]; n != nil {
			details["max_nmodules"] = n
		}
	}
	o.mu.Lock()
	o.known[uuid] = details
	o.mu.Unlock()
	_ = o.peer.Publish(l.Topic, 2, Message(e.ObjectID, "", o.answer(), object{"result": "ok", "details": details}))
}

func (o *Orchestrator) control(l Line, e envelope) {
	switch e.Action {
	case "create":
		o.create(l, e)
	case "exited":
		if e.Type != o.kind() {
			_ = o.peer.Publish(o.realm+"/proc/log/orchestrator", 2,
				Message(e.ObjectID, "error", "resp", object{"desc": "invalid action/type", "data": e.Data}))
			return
		}
		_ = o.peer.Publish(o.realm+"/proc/notif", 2, Message("", "exited", o.kind(), object{"type": "module", "uuid": e.Data["uuid"]}))
	case "delete":
		if parent := e.text("parent"); l.Topic == ctl(o.realm) && parent != "" {
			_ = o.Delete(parent, e.text("uuid"))
		}
	}
}

func (o *Orchestrator) create(l Line, e envelope) {
	data := object{
		"filetype": "WA", "apis": []string{"wasm", "wasi"}, "args": []string{}, "env": []string{}, "channels": []string{},
		"peripherals": []string{},
		"resources":   nil, "fault_crash": "ignore", "status": "A",
	}
	maps.Copy(data, e.Data)
	o.mu.Lock()
	_, duplicate := o.known[e.text("uuid")]
	if !duplicate {
		o.known[e.text("uuid")] = data
	}
	o.mu.Unlock()
	if duplicate {
		_ = o.peer.Publish(o.realm+"/proc/log/orchestrator", 2,
			Message("", "error", o.answer(), object{"desc": "duplicate module UUID; request ignored", "data": data}))
		return
	}
	_ = o.peer.Publish(l.Topic+"/"+e.text("parent"), 2, Message("", "create", o.kind(), data))
}
