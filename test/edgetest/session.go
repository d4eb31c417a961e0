package edgetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Names of the recorded session.
const (
	Realm       = "realm"
	ManagerUUID = "22222222-0000-4000-8000-000000000001"
	RuntimeMin  = "11111111-0000-4000-8000-000000000001"
	RuntimeChan = "11111111-0000-4000-8000-000000000003"
	RuntimeTwo  = "11111111-0000-4000-8000-000000000004"
	ModuleHello = "33333333-0000-4000-8000-000000000001"
	ModuleIn    = "33333333-0000-4000-8000-000000000002"
	ModuleIdle  = "33333333-0000-4000-8000-000000000003"
	ModuleOut   = "33333333-0000-4000-8000-000000000004"
)

// SessionManager is the manager of the recorded session.
func SessionManager(url string, later bool) ManagerConfig {
	channels := []string{"wasm", "wasi", "channels"}
	return ManagerConfig{URL: url, Realm: Realm, UUID: ManagerUUID, Name: "node", Later: later, Runtimes: []RuntimeInfo{
		{UUID: RuntimeMin, Name: "min", Type: "linux/minimal", APIs: []string{"wasm", "wasi", "stdin", "stdout"}},
		{UUID: RuntimeChan, Name: "chan", Type: "test/chan", APIs: channels},
		{UUID: RuntimeTwo, Name: "chan2", Type: "test/chan", APIs: channels},
	}}
}

// request is the client's request for a module.
type request struct {
	id, topic string
	data      string // JSON
}

func createData(uuid, name, parent, file, args, channels string) string {
	return fmt.Sprintf(`{"type":"module","uuid":%q,"name":%q,"parent":%q,"filename":"/srv/wasm/%s.wasm","args":%s,"env":[],"channels":%s}`,
		uuid, name, parent, file, args, channels)
}

const (
	channelsIn  = `[{"mode":"r","topic":"app/in"},{"mode":"w","topic":"app/mid"}]`
	channelsOut = `[{"mode":"r","topic":"app/mid"},{"mode":"w","topic":"app/out"}]`
)

// requests are the client's requests, in order. Two of them go directly to a runtime's topic, like some requests of the
// public client.
var requests = []request{
	{"o-1", "realm/proc/control", createData(ModuleHello, "h", RuntimeMin, "hello", `["hello","x"]`, `[]`)},
	{"o-2", "realm/proc/control", createData(ModuleIn, "a", RuntimeChan, "upper", `["upper","x"]`, channelsIn)},
	{"o-3", "realm/proc/control/" + RuntimeTwo, createData(ModuleIdle, "b", RuntimeTwo, "upper", `["upper","x"]`, `[]`)},
	{"o-4", "realm/proc/control/" + RuntimeTwo, createData(ModuleOut, "c", RuntimeTwo, "upper", `["upper","x"]`, channelsOut)},
}

func (r request) payload(later bool) []byte {
	return fmt.Appendf(nil, `{"object_id":%q,"action":"create","type":%q,"data":%s}`, r.id, kind(later), r.data)
}

// Player plays the client of the recorded session. It waits for the result of each step, so that every session is the
// same.
type Player struct {
	URL      string
	Recorder *Recorder
	// OnlyControl sends every request to the orchestrator's topic, and none to a runtime's.
	OnlyControl bool
	Later       bool // the client is a later one
	// BeforeQuit is called before the last step, for example to send keepalives; it can be nil.
	BeforeQuit func() error
}

// Play plays the session. The manager and its runtimes must be registered.
func (p Player) Play(ctx context.Context) error {
	client, err := Dial(PeerOptions{URL: p.URL, ID: "edgetest-client"})
	if err != nil {
		return err
	}
	defer client.Close()
	running := map[string]func(Line) bool{
		"o-1": p.exited(ModuleHello), "o-2": started(ModuleIn), "o-3": started(ModuleIdle), "o-4": started(ModuleOut),
	}
	for _, r := range requests {
		topic := r.topic
		if p.OnlyControl {
			topic = "realm/proc/control"
		}
		if err := client.Publish(topic, 2, r.payload(p.Later)); err != nil {
			return err
		}
		if _, err := p.Recorder.Wait(ctx, 1, running[r.id]); err != nil {
			return fmt.Errorf("after the request %s: %w", r.id, err)
		}
	}
	if err := client.Publish("app/in", 2, []byte("hello seed")); err != nil {
		return err
	}
	if _, err := p.Recorder.Wait(ctx, 1, On("app/out", "HELLO SEED")); err != nil {
		return fmt.Errorf("after the message: %w", err)
	}
	if p.BeforeQuit != nil {
		if err := p.BeforeQuit(); err != nil {
			return err
		}
	}
	if err := client.Publish("app/in", 2, []byte("quit")); err != nil {
		return err
	}
	_, err = p.Recorder.Wait(ctx, 1, p.exited(ModuleIn))
	return err
}

// exited matches the message in which a manager reports a module's exit.
func (p Player) exited(uuid string) func(Line) bool {
	return func(l Line) bool {
		text := string(l.Payload)
		return strings.HasPrefix(l.Topic, "realm/proc/control/") && strings.Contains(text, uuid) && strings.Contains(text, `"exited"`)
	}
}

// started matches the log line of a module that has opened its channels.
func started(uuid string) func(Line) bool {
	return func(l Line) bool {
		return strings.HasPrefix(l.Topic, "realm/proc/log/") && strings.HasSuffix(l.Topic, uuid) &&
			strings.HasPrefix(string(l.Payload), "module started")
	}
}

// Later returns a session of the seed's peers as later peers would have played it.
func Later(session Lines) Lines {
	types := strings.NewReplacer(`"arts_req"`, `"req"`, `"arts_resp"`, `"resp"`)
	all := slices.Clone(session)
	for i, l := range all {
		all[i].Payload = []byte(types.Replace(string(l.Payload)))
	}
	return all
}

// Session returns the recorded session of a public manager with three runtimes, a public orchestrator and a public
// client. It was recorded on an external broker, and includes the orchestrator's peculiarities (Orchestrator).
func Session() Lines {
	var s Lines
	add := func(qos byte, topic, payload string) {
		s = append(s, Line{Topic: topic, QoS: qos, Payload: []byte(payload)})
	}
	envelope := func(action, kind, data string) string {
		if action != "" {
			action = fmt.Sprintf(`"action":%q,`, action)
		}
		return fmt.Sprintf(`{"object_id":"any",%s"type":%q,"data":%s}`, action, kind, data)
	}
	// Registrations: requests with QoS 0, answers with QoS 2 and without an action.
	manager := fmt.Sprintf(`{"type":"manager","uuid":%q,"name":"node"}`, ManagerUUID)
	add(0, "realm/proc/reg/"+ManagerUUID, envelope("create", "arts_req", manager))
	add(2, "realm/proc/reg/"+ManagerUUID,
		envelope("", "arts_resp", fmt.Sprintf(`{"result":"ok","details":{"uuid":%q,"name":"node","status":"A"}}`, ManagerUUID)))
	for _, rt := range []struct{ uuid, name, kind, apis string }{
		{RuntimeMin, "min", "linux/minimal", `["wasm","wasi","stdin","stdout"]`},
		{RuntimeChan, "chan", "test/chan", `["wasm","wasi","channels"]`},
		{RuntimeTwo, "chan2", "test/chan", `["wasm","wasi","channels"]`},
	} {
		fields := fmt.Sprintf(`"uuid":%q,"name":%q,"runtime_type":%q,"apis":%s,"parent":%q`, rt.uuid, rt.name, rt.kind, rt.apis, ManagerUUID)
		add(0, "realm/proc/reg/"+rt.uuid, envelope("create", "arts_req", `{"type":"runtime",`+fields+`}`))
		add(2, "realm/proc/reg/"+rt.uuid, envelope("", "arts_resp", `{"result":"ok","details":{`+fields+
			`,"ka_interval_sec":60,"max_nmodules":100,"page_size":65536,"aot_target":{},"metadata":null,"platform":null,"status":"A"}}`))
	}
	// Modules: the request, the orchestrator's order, and the orchestrator's error about its own order.
	const added = `,"filetype":"WA","apis":["wasm","wasi"],"peripherals":[],"resources":null,"fault_crash":"ignore","status":"A"}`
	for i, rt := range []string{RuntimeMin, RuntimeChan, RuntimeTwo, RuntimeTwo} {
		r := requests[i]
		full := strings.TrimSuffix(r.data, "}") + added
		add(2, r.topic, string(r.payload(false)))
		add(2, r.topic+"/"+rt, envelope("create", "arts_req", full))
		add(2, "realm/proc/log/orchestrator", envelope("error", "arts_resp", `{"desc":"duplicate module UUID; request ignored","data":`+full+`}`))
	}
	for _, m := range [][2]string{{RuntimeChan, ModuleIn}, {RuntimeTwo, ModuleIdle}, {RuntimeTwo, ModuleOut}} {
		add(0, "realm/proc/log/"+m[0]+"/"+m[1], "module started pid=1")
	}
	// The modules' messages and exits.
	add(0, "std/"+ModuleHello, "hello argc=2 [x] SLTEST=(unset)\n")
	add(2, "app/in", "hello seed")
	add(0, "app/mid", "HELLO SEED\n")
	add(0, "app/out", "HELLO SEED\n")
	add(2, "app/in", "quit")
	add(0, "realm/proc/profile/test/"+RuntimeChan+"/"+ModuleIn, Profile)
	exit := func(rt, uuid, fields string) {
		module := fmt.Sprintf(`{"type":"module","uuid":%q`, uuid)
		add(0, "realm/proc/control/"+rt, envelope("exited", "arts_req", module+fields))
		add(2, "realm/proc/notif", envelope("exited", "arts_req", module+"}"))
	}
	exit(RuntimeMin, ModuleHello, `,"status":"exited"}`)
	exit(RuntimeChan, ModuleIn, `,"status":"exited","exit_code":3}`)
	for _, ka := range [][3]string{{RuntimeChan, "chan", "[0]"}, {RuntimeTwo, "chan2", "[0,1]"}} {
		add(0, "realm/proc/keepalive/"+ka[0], envelope("update", "arts_req",
			fmt.Sprintf(`{"type":"runtime","uuid":%q,"apis":["wasm","wasi","channels"],"name":%q,"children":%s}`, ka[0], ka[1], ka[2])))
	}
	add(2, "realm/proc/reg/"+ManagerUUID, envelope("delete", "arts_req", manager)) // the last will
	return s
}
