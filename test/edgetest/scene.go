package edgetest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Names of the sessions of scene-scoped peers.
const (
	SceneName        = "public/arena"
	SceneRuntimeUUID = "44444444-0000-4000-8000-000000000001"
	SceneClientUUID  = "44444444-0000-4000-8000-000000000002"
	SceneModuleUUID  = "55555555-0000-4000-8000-000000000001"
	SceneOtherUUID   = "55555555-0000-4000-8000-000000000002"
)

// KeepaliveInterval is that of a SceneRuntime.
const KeepaliveInterval = time.Second

// Topics of scene-scoped peers, without internal/edge/wire.
func sceneRuntime(uuid string) string   { return Realm + "/g/public/p/" + uuid }
func sceneModule(uuid string) string    { return Realm + "/s/" + SceneName + "/p/" + uuid }
func sceneControl(uuid string) string   { return sceneModule(uuid) + "/" + SceneClientUUID }
func sceneStream(uuid, s string) string { return sceneModule(uuid) + "/-/" + s }

// sceneMessage returns a message with the sender's uuid.
func sceneMessage(id, action, kind, from string, data object) []byte {
	if id == "" {
		id = newID()
	}
	b, err := json.Marshal(object{"object_id": id, "action": action, "type": kind, "from": from, "data": data})
	if err != nil {
		panic(err) // the data come from tests
	}
	return b
}

// SceneRuntimeConfig configures a SceneRuntime.
type SceneRuntimeConfig struct {
	URL, UUID, Name string
	// Attempts is the number of registrations that it tries; 0 means without end, and less than 0 none, as public runtimes
	// do by default.
	Attempts int
	// Resend is the time between registrations.
	Resend time.Duration
}

// SceneRuntime imitates the public scene-scoped runtime. All its messages have QoS 0. A module says "ready" on its standard
// output, repeats there in capitals what it reads, and ends by itself when that is "quit". The runtime refuses files of
// another type than PY.
type SceneRuntime struct {
	cfg  SceneRuntimeConfig
	peer *Peer

	mu       sync.Mutex
	modules  map[string]object // the data of their creation, by uuid
	answered chan struct{}
}

// StartSceneRuntime connects a runtime and registers it.
func StartSceneRuntime(ctx context.Context, cfg SceneRuntimeConfig) (*SceneRuntime, error) {
	r := &SceneRuntime{cfg: cfg, modules: map[string]object{}, answered: make(chan struct{}, 1)}
	will := Line{Topic: sceneRuntime(cfg.UUID), Payload: sceneMessage("", "delete", "req", cfg.UUID, r.identity())}
	var err error
	if r.peer, err = Dial(PeerOptions{URL: cfg.URL, ID: "edgetest-scene-" + cfg.Name, Plain: true, Will: &will}); err != nil {
		return nil, err
	}
	if err := r.register(ctx); err != nil {
		r.peer.Close()
		return nil, err
	}
	if err := r.peer.Subscribe(Realm+"/s/+/+/p/+/+", r.control); err != nil {
		r.peer.Close()
		return nil, err
	}
	return r, nil
}

// Close ends the runtime as its public model does, with a message like its will.
func (r *SceneRuntime) Close() {
	r.say(sceneRuntime(r.cfg.UUID), "", "delete", "req", r.identity())
	r.peer.Close()
}

// Kill drops the connection; the broker publishes the will.
func (r *SceneRuntime) Kill() { r.peer.Kill() }

// Forget ends a module without a word, as if the message had been lost.
func (r *SceneRuntime) Forget(uuid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.modules, uuid)
}

// Keepalive sends a keepalive.
func (r *SceneRuntime) Keepalive() {
	data, children := r.identity(), []object{}
	r.mu.Lock()
	for uuid, m := range r.modules {
		children = append(children, object{"uuid": uuid, "name": m["name"], "file": m["file"], "filetype": m["filetype"], "parent": r.cfg.UUID,
			"cpu_usage_percent": 0.5, "mem_usage": 1 << 20, "network_rx_mb": 0.1, "network_tx_mb": 0.2, "network_rx_pkts": 3, "network_tx_pkts": 4})
	}
	r.mu.Unlock()
	data["children"] = children
	r.say(sceneRuntime(r.cfg.UUID), "", "update", "req", data)
}

func (r *SceneRuntime) identity() object {
	return object{"uuid": r.cfg.UUID, "type": "runtime", "name": r.cfg.Name, "runtime_type": "containerized-modules", "max_nmodules": 100,
		"apis": []string{"python:python3"}, "is_orchestration_runtime": false, "tags": nil, "ka_interval_sec": KeepaliveInterval.Seconds()}
}

func (r *SceneRuntime) register(ctx context.Context) error {
	if r.cfg.Attempts < 0 {
		return nil
	}
	topic := sceneRuntime(r.cfg.UUID)
	if err := r.peer.Subscribe(topic, func(l Line) {
		var e envelope
		if json.Unmarshal(l.Payload, &e) == nil && e.Type == "resp" && e.Data["result"] == "ok" {
			select {
			case r.answered <- struct{}{}:
			default:
			}
		}
	}); err != nil {
		return err
	}
	for n := 0; r.cfg.Attempts == 0 || n < r.cfg.Attempts; n++ {
		r.say(topic, "", "create", "req", r.identity())
		select {
		case <-r.answered:
			return r.peer.Unsubscribe(topic)
		case <-time.After(r.cfg.Resend):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return r.peer.Unsubscribe(topic) // it serves without an orchestrator
}

func (r *SceneRuntime) say(topic, id, action, kind string, data object) {
	_ = r.peer.Publish(topic, 0, sceneMessage(id, action, kind, r.cfg.UUID, data)) // a lost connection ends the test elsewhere
}

func (r *SceneRuntime) control(l Line) {
	var e envelope
	if json.Unmarshal(l.Payload, &e) != nil || e.Type != "req" {
		return
	}
	uuid := e.text("uuid")
	r.mu.Lock()
	known, ours := r.modules[uuid], e.text("parent") == r.cfg.UUID || e.text("parent") == r.cfg.Name
	r.mu.Unlock()
	topic := Realm + "/s/" + e.text("scene") + "/p/" + uuid
	switch {
	case e.Action == "create" && ours && e.text("filetype") != "PY":
		r.say(topic, e.ObjectID, "create", "resp",
			object{"result": "error", "details": object{"desc": "no launcher for " + e.text("filetype"), "data": e.Data}})
	case e.Action == "create" && ours && known == nil:
		r.start(topic, uuid, e)
	case e.Action == "delete" && ours && known != nil:
		r.Forget(uuid)
		scene, _ := known["scene"].(string)
		r.say(Realm+"/s/"+scene+"/p/"+uuid, e.ObjectID, "delete", "resp", object{"result": "ok", "details": e.Data})
	}
}

func (r *SceneRuntime) start(topic, uuid string, e envelope) {
	r.mu.Lock()
	r.modules[uuid] = e.Data
	r.mu.Unlock()
	_ = r.peer.Subscribe(topic+"/-/stdin", func(l Line) {
		if bytes.Equal(l.Payload, []byte("quit")) {
			r.Forget(uuid)
			r.say(topic, "", "delete", "req", object{"type": "module", "uuid": uuid, "name": e.Data["name"], "parent": r.cfg.UUID})
			return
		}
		_ = r.peer.Publish(topic+"/-/stdout", 0, append(bytes.ToUpper(l.Payload), '\n'))
	})
	r.say(topic, e.ObjectID, "create", "resp", object{"result": "ok", "details": e.Data})
	args, _ := json.Marshal(e.Data["args"])
	_ = r.peer.Publish(topic+"/-/stdout", 0, fmt.Appendf(nil, "ready %s\n", args))
}

// SceneClient imitates the public scene-scoped client.
type SceneClient struct{ peer *Peer }

// StartSceneClient connects a client.
func StartSceneClient(url string) (*SceneClient, error) {
	peer, err := Dial(PeerOptions{URL: url, ID: "edgetest-scene-client", Plain: true})
	if err != nil {
		return nil, err
	}
	return &SceneClient{peer}, nil
}

// Close disconnects the client.
func (c *SceneClient) Close() { c.peer.Close() }

// SceneModule returns the data of a request for a module. The parent "" leaves the runtime to an orchestrator.
func SceneModule(uuid, parent, file, filetype string, args ...string) map[string]any {
	if args == nil {
		args = []string{}
	}
	data := object{"type": "module", "uuid": uuid, "name": "m", "scene": SceneName, "file": file, "location": "arena/py", "filetype": filetype,
		"args": args, "env": object{"NAMESPACE": "public", "SCENE": "arena"}, "channels": []string{}, "peripherals": []string{}, "resources": nil,
		"fault_crash": "ignore", "status": "A"}
	if parent != "" {
		data["parent"] = parent
	}
	return data
}

// Create asks for a module. The topic names the parent or, without one, the client.
func (c *SceneClient) Create(id string, data map[string]any) error {
	to, _ := data["parent"].(string)
	if to == "" {
		to = SceneClientUUID
	}
	return c.peer.Publish(sceneControl(to), 0, sceneMessage(id, "create", "req", SceneClientUUID, data))
}

// Delete asks for the end of a module.
func (c *SceneClient) Delete(id, parent, uuid string) error {
	return c.peer.Publish(sceneControl(parent), 0, sceneMessage(id, "delete", "req", SceneClientUUID,
		object{"type": "module", "uuid": uuid, "name": "m", "parent": parent}))
}

// Input sends a line to the module's standard input.
func (c *SceneClient) Input(uuid, text string) error {
	return c.peer.Publish(sceneStream(uuid, "stdin"), 0, []byte(text))
}

// Output matches a message of the module's standard output.
func Output(uuid, text string) func(Line) bool {
	return func(l Line) bool { return l.Topic == sceneStream(uuid, "stdout") && string(l.Payload) == text }
}

// SceneAnswer matches the answer to a request on the module's topic.
func SceneAnswer(uuid, id, action, result string) func(Line) bool {
	return onModule(uuid, func(e envelope) bool {
		return e.ObjectID == id && e.Action == action && e.Type == "resp" && e.Data["result"] == result
	})
}

// SceneEnd matches a deletion by the module's runtime.
func SceneEnd(uuid string) func(Line) bool {
	return onModule(uuid, func(e envelope) bool { return e.Action == "delete" && e.Type == "req" && e.text("uuid") == uuid })
}

func onModule(uuid string, want func(envelope) bool) func(Line) bool {
	return func(l Line) bool {
		var e envelope
		return l.Topic == sceneModule(uuid) && json.Unmarshal(l.Payload, &e) == nil && want(e)
	}
}

// SceneOrchestrator imitates a scene-scoped orchestrator: it answers registrations, and knows runtimes by their keepalives.
type SceneOrchestrator struct {
	peer *Peer

	mu    sync.Mutex
	known map[string]bool
}

// StartSceneOrchestrator connects an orchestrator.
func StartSceneOrchestrator(url string) (*SceneOrchestrator, error) {
	peer, err := Dial(PeerOptions{URL: url, ID: "edgetest-scene-orchestrator", Plain: true})
	if err != nil {
		return nil, err
	}
	o := &SceneOrchestrator{peer: peer, known: map[string]bool{}}
	err = peer.Subscribe(Realm+"/g/+/p/+", func(l Line) {
		var e envelope
		if json.Unmarshal(l.Payload, &e) != nil || e.Type != "req" {
			return
		}
		uuid := lastLevel(l.Topic)
		o.mu.Lock()
		o.known[uuid] = e.Action != "delete"
		o.mu.Unlock()
		if e.Action == "create" {
			details := object{"status": "A"}
			maps.Copy(details, e.Data)
			_ = peer.Publish(l.Topic, 0, sceneMessage(e.ObjectID, "create", "resp", "orchestrator", object{"result": "ok", "details": details}))
		}
	})
	if err != nil {
		peer.Close()
		return nil, err
	}
	return o, nil
}

// Close disconnects the orchestrator.
func (o *SceneOrchestrator) Close() { o.peer.Close() }

// Knows reports whether the runtime is registered or has sent a keepalive, and has not ended.
func (o *SceneOrchestrator) Knows(uuid string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.known[uuid]
}

// SceneLines returns the messages about a module, as lines "topic below the module's: text", in the order of their first arrival,
// each once. Ids, and data that echo the request, are left out.
func SceneLines(ls Lines, uuid string) []string {
	var all []string
	add := func(line string) {
		if !slices.Contains(all, line) {
			all = append(all, line)
		}
	}
	for _, l := range ls.Below(sceneModule(uuid)) {
		topic := strings.TrimPrefix(l.Topic, sceneModule(uuid))
		var e struct {
			envelope
			From string `json:"from"`
		}
		if json.Unmarshal(l.Payload, &e) != nil {
			add(fmt.Sprintf("%s q%d %q", topic, l.QoS, l.Payload))
			continue
		}
		data := fmt.Sprint("result=", e.Data["result"])
		if e.Type == "req" {
			data = fmt.Sprint("uuid=", e.Data["uuid"], " parent=", e.Data["parent"])
		}
		add(strings.TrimSpace(fmt.Sprintf("%s q%d %s %s from=%s %s", topic, l.QoS, e.Action, e.Type, e.From, data)))
	}
	return all
}
