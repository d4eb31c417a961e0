package manager

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// The manager is for scene-scoped peers a runtime of theirs, once for each of its runtimes. It announces the runtimes on
// their topics, obeys requests that name one of them as the parent, and says on a module's topic what became of it. It
// needs no answer to the announcement, because by default these peers give none.

// fromScene is the origin of modules that a scene-scoped peer created. Their ends are reported on their own topics.
const fromScene = "scene"

// sceneMessage handles a message on a topic of scene-scoped peers. Most of them are for the runtimes of others.
func (m *Manager) sceneMessage(t wire.SceneTopic, msg mqtt.Message) {
	e, err := wire.ParseEnvelope(msg.Payload)
	switch {
	case err != nil || msg.Retain || m.host(e.From) != nil:
		m.counts.ignored.Inc()
	case t.Namespace != "" && e.IsResponse():
		var a answer
		if h := m.host(t.UUID); h != nil && json.Unmarshal(e.Data, &a) == nil && a.Result == "ok" {
			h.announced.Store(true)
		}
	case t.Control && e.IsRequest():
		m.sceneRequest(t, e, msg.Payload)
	default:
		m.counts.ignored.Inc()
	}
}

// sceneRequest obeys a request about a module of one of the manager's runtimes.
func (m *Manager) sceneRequest(t wire.SceneTopic, e wire.Envelope, payload []byte) {
	data, err := wire.ParseModuleData(e.Data)
	h := m.named(data.Parent())
	if err == nil && e.Action == wire.ActionDelete {
		owner, mod := m.owner(data.UUID())
		if mod != nil && mod.data.Scene() != t.Scene {
			m.counts.ignored.Inc() // the topic's scene is all that a broker can check of the client's rights
			return
		}
		h = cmp.Or(owner, h, m.host(t.UUID))
	}
	if err != nil || h == nil || h.recent.isRepeat(e.ObjectID, payload, time.Now()) {
		m.counts.ignored.Inc()
		return
	}
	data = data.FromScene(t)
	var reason string
	switch kind := data.Kind(e.Action); {
	case kind != "module":
		reason, err = "missing-field", fmt.Errorf("%s: %q is %q: want module: %w", e.Action, "type", kind, errdefs.ErrInvalidArgument)
	case e.Action == wire.ActionCreate:
		reason, err = reasonFor(h.create(e.ObjectID, fromScene, data))
	case e.Action == wire.ActionDelete:
		reason, err = reasonFor(h.delete(data.UUID(), e.ObjectID))
	default:
		reason, err = "unknown-action", fmt.Errorf("action %q: want create or delete: %w", e.Action, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		h.answerScene(reason, e.Action, e.ObjectID, data, err)
	}
}

// named returns the host of the runtime with this uuid or name, or nil.
func (m *Manager) named(parent string) *host {
	for _, h := range m.hosts {
		if parent == h.info.UUID || parent == h.info.Name {
			return h
		}
	}
	return nil
}

// owner returns the module with this uuid and its host, or nil.
func (m *Manager) owner(uuid string) (*host, *module) {
	for _, h := range m.hosts {
		h.mu.Lock()
		mod := h.byUUID[uuid]
		h.mu.Unlock()
		if mod != nil {
			return h, mod
		}
	}
	return nil, nil
}

// answerScene answers a scene-scoped peer's request on the module's topic. After an error it also counts it, with the
// given reason.
func (h *host) answerScene(reason, action, objectID string, data wire.ModuleData, err error) {
	fields := map[string]any{"result": "ok", "details": data.Bytes()}
	if err != nil {
		h.m.refuse(reason, "control message refused", "err", err)
		fields["result"] = "error"
		fields["details"] = object(map[string]any{"desc": err.Error(), "data": data.Bytes()})
	}
	topic := h.m.config.Topics.SceneModule(data.Scene(), data.UUID())
	if wire.ValidName("uuid", data.UUID()) != nil {
		topic = h.m.config.Topics.SceneRuntime(wire.DefaultNamespace, h.info.UUID)
	}
	e := wire.Envelope{ObjectID: objectID, Action: action, Type: wire.ResponseLater, From: h.info.UUID, Data: object(fields)}
	h.m.publish(h.m.ctx, topic, 2, false, e.Bytes())
}

// confirm answers the request for a module of a scene-scoped peer, once. If the daemon is killed before that is recorded, the
// next one answers again.
func (h *host) confirm(mod *module) {
	if mod.record.Origin != fromScene || mod.record.Confirmed { // only the module's launcher sets it
		return
	}
	h.answerScene("", wire.ActionCreate, mod.record.ObjectID, mod.data, nil)
	h.orders.Lock()
	defer h.orders.Unlock()
	h.mu.Lock()
	mod.record.Confirmed = true
	r, recorded := mod.record, mod.state.recorded()
	h.mu.Unlock()
	if recorded != recordCreated {
		return // its end is recorded
	}
	if err := h.m.put(mod.uuid, r); err != nil {
		h.m.refuse("record", "cannot record the answer to a request", "module", mod.uuid, "err", err)
	}
}

// exitMessage returns the report of an exit: in the dialect of the orchestrator, or for a module of a scene-scoped peer
// the answer to the request for its deletion, or without such a request a deletion by the runtime.
func (h *host) exitMessage(e exit) (topic string, payload []byte) {
	if e.Scene == "" {
		return h.m.config.Topics.ControlOf(e.Runtime), h.m.request(wire.ActionExited, h.exitedData(e.UUID, e.Payload)).Bytes()
	}
	fields, _ := wire.ParseObject(h.exitedData(e.UUID, e.Payload)) // always an object
	wire.ModuleData(fields).Set("name", e.Name)
	wire.ModuleData(fields).Set("parent", e.Runtime)
	data := wire.ModuleData(fields).Bytes()
	out := wire.Envelope{ObjectID: newID(), Action: wire.ActionDelete, Type: wire.RequestLater, From: e.Runtime, Data: data}
	if e.Asked != "" {
		out.ObjectID, out.Type = e.Asked, wire.ResponseLater
		out.Data = object(map[string]any{"result": "ok", "details": data})
	}
	return h.m.config.Topics.SceneModule(e.Scene, e.UUID), out.Bytes()
}

// exitOf returns the exit of a module, for its report.
func (h *host) exitOf(mod *module, payload []byte) exit {
	e := exit{Runtime: h.info.UUID, UUID: mod.uuid, Payload: payload}
	if mod.record.Origin == fromScene {
		e.Scene, e.Name, e.Asked = mod.data.Scene(), mod.data.Name(), mod.record.Asked
	}
	return e
}

// announce publishes the runtime's state for scene-scoped peers: a create registers it, an update is a keepalive, a
// delete ends both.
func (h *host) announce(ctx context.Context, action string) {
	fields := map[string]json.RawMessage{}
	if action != wire.ActionDelete {
		fields, _ = wire.ParseObject(h.registration(nil)) // always an object
	}
	data := wire.ModuleData(fields)
	data.Set("type", "runtime")
	data.Set("uuid", h.info.UUID)
	data.Set("name", h.info.Name)
	if action == wire.ActionUpdate {
		children := []json.RawMessage{}
		ctx, cancel := context.WithTimeout(ctx, usageTimeout)
		defer cancel()
		for _, mod := range h.all() {
			children = append(children, h.child(ctx, mod))
		}
		data.Set("children", children)
	}
	e := wire.Envelope{ObjectID: newID(), Action: action, Type: wire.RequestLater, From: h.info.UUID, Data: data.Bytes()}
	h.m.publish(h.m.ctx, h.m.config.Topics.SceneRuntime(wire.DefaultNamespace, h.info.UUID), 0, false, e.Bytes())
}

// usageTimeout bounds the measurement of all modules of a runtime. Modules that are not measured in time are named without
// figures.
const usageTimeout = time.Second

// child describes a module in a keepalive. Modules of the node's own runtime have no network of their own.
func (h *host) child(ctx context.Context, mod *module) json.RawMessage {
	fields := map[string]any{"uuid": mod.uuid, "name": mod.data.Name(), "parent": h.info.UUID, "file": mod.data.File(),
		"filetype": mod.data.FileType()}
	if meter, ok := h.rt.(runtime.Meter); ok {
		if u, ok := meter.Usage(ctx, mod.record.Index); ok {
			fields["cpu_usage_percent"], fields["mem_usage"] = 100*u.CPU, u.Memory
			fields["network_rx_mb"], fields["network_tx_mb"], fields["network_rx_pkts"], fields["network_tx_pkts"] = 0, 0, 0, 0
		}
	}
	return object(fields)
}

// keepScenes tells scene-scoped peers that the runtime lives. It registers the runtime again until an orchestrator, in
// whatever dialect, has confirmed a registration.
func (h *host) keepScenes(ctx context.Context) {
	if !h.announced.Load() && !h.m.registered.Load() {
		h.announce(ctx, wire.ActionCreate)
	}
	h.announce(ctx, wire.ActionUpdate)
}

// logStream remembers that a channel of the module is its standard output or error, which is its log, too.
func (h *host) logStream(mod *module, fd int, topic string) {
	scene, t := mod.data.Scene(), h.m.config.Topics
	delete(mod.logs, fd)
	if scene == "" || topic != t.SceneStream(scene, mod.uuid, wire.Stdout) && topic != t.SceneStream(scene, mod.uuid, wire.Stderr) {
		return
	}
	if mod.logs == nil {
		mod.logs = map[int]bool{}
	}
	mod.logs[fd] = true
}

// isStdin reports whether the topic is that of the module's standard input.
func (h *host) isStdin(mod *module, topic string) bool {
	scene := mod.data.Scene()
	return scene != "" && topic == h.m.config.Topics.SceneStream(scene, mod.uuid, wire.Stdin)
}

// line returns a message to the standard input as a line.
func line(payload []byte) []byte {
	if len(payload) == 0 || payload[len(payload)-1] == '\n' {
		return payload
	}
	return append(append(make([]byte, 0, len(payload)+1), payload...), '\n')
}
