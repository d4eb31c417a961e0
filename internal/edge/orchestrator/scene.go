package orchestrator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Dialect is how a peer, or the client that created a module, writes its messages. The zero value is the seed's dialect.
type Dialect struct {
	// Later is set if messages have the types of later peers, "req" and "resp".
	Later bool `json:"later,omitempty"`
	// Scene is set for scene-scoped peers (wire.SceneTopic): the namespace of a runtime, or the scene of a module whose
	// client the orchestrator has to answer.
	Scene string `json:"scene,omitempty"`
}

// scene handles a message on a topic of scene-scoped peers. These topics have messages for others, which it ignores.
func (o *Orchestrator) scene(ctx context.Context, topic wire.SceneTopic, e wire.Envelope) error {
	if e.From == o.uuid || o.own.has(e.ObjectID) && e.IsRequest() {
		return errIgnored
	}
	d, err := parse(e.Data)
	if err != nil {
		return errors.Join(errIgnored, err)
	}
	act := func(decide func(*transition, wire.SceneTopic, wire.Envelope, wire.ModuleData) error) error {
		return o.transact(ctx, func(t *transition) error { return decide(t, topic, e, d) })
	}
	switch {
	case topic.Namespace != "" && e.IsRequest():
		return act((*transition).sceneRuntime)
	case topic.Namespace != "":
		return errIgnored
	case !topic.Control:
		return act((*transition).sceneReport)
	case e.IsRequest() && e.Action == wire.ActionCreate:
		return act((*transition).sceneCreate)
	case e.IsRequest() && e.Action == wire.ActionDelete:
		return act((*transition).sceneDelete)
	}
	return errIgnored
}

// sceneRuntime handles the registration, the keepalive or the end of a runtime. A runtime need not register: its first
// keepalive says the same. A runtime with a parent is not scene-scoped: its manager registers it.
func (t *transition) sceneRuntime(topic wire.SceneTopic, e wire.Envelope, d wire.ModuleData) error {
	r := t.get(key{Runtime, topic.UUID})
	if d.Parent() != "" || r != nil && r.Parent != "" || d.Text("type") != string(Runtime) {
		return errIgnored
	}
	switch e.Action {
	case wire.ActionCreate:
		return t.register(topic.UUID, e, topic.Namespace)
	case wire.ActionUpdate:
		if r == nil || r.Scene != topic.Namespace || r.differs(d) {
			if err := t.register(topic.UUID, e, topic.Namespace); err != nil {
				return err
			}
		}
		return t.heartbeat(topic.UUID, e.Data)
	case wire.ActionDelete:
		if r == nil {
			return errIgnored
		}
		return t.loseAll(r)
	}
	return errIgnored
}

// differs reports whether a keepalive says something else about the runtime than its record.
func (r *Record) differs(d wire.ModuleData) bool {
	for _, name := range []string{"name", "apis", "max_nmodules"} {
		if raw := d[name]; len(raw) > 0 && !bytes.Equal(raw, r.Data[name]) {
			return true
		}
	}
	return false
}

// sceneCreate handles a client's request for a module. If the request names a runtime that hears it, that runtime answers, and
// the orchestrator only records the module, if it can. If it names an unknown one, that is another orchestrator's.
func (t *transition) sceneCreate(topic wire.SceneTopic, e wire.Envelope, d wire.ModuleData) error {
	d = d.FromScene(topic)
	e.Data = d.Bytes()
	if parent := d.Parent(); parent != "" {
		r := t.runtimeNamed(parent)
		if r == nil {
			return errIgnored
		}
		if r.hearsScenes() {
			if err := t.adopt(r.UUID, e, Dialect{Later: true, Scene: d.Scene()}); err != nil {
				return errors.Join(errIgnored, err)
			}
			return nil
		}
	}
	if err := t.create(e.Data, e.ObjectID, Dialect{Later: true, Scene: d.Scene()}); err != nil {
		return err
	}
	m := t.get(key{Module, d.UUID()})
	if t.answersClient(m) {
		answer := wire.ModuleData{"details": m.details().Bytes()}
		answer.Set("result", "ok")
		t.publish(t.o.config.Topics.SceneModule(m.Scene, m.UUID), t.o.sign(e.Answer(answer.Bytes())))
	}
	return nil
}

// sceneDelete handles a client's request to delete a module of the topic's scene. It ignores the modules of others.
func (t *transition) sceneDelete(topic wire.SceneTopic, e wire.Envelope, d wire.ModuleData) error {
	m := t.get(key{Module, d.UUID()})
	if m == nil || m.Data.Scene() != topic.Scene {
		return errIgnored
	}
	m = t.edit(m)
	m.Asked = e.ObjectID
	r := t.get(key{Runtime, m.Parent})
	// The public runtimes obey a request that names them; our managers also one that does not.
	if r != nil && r.Status == Alive && m.Status == Alive && r.hearsScenes() &&
		(r.Scene == "" || d.Parent() == r.UUID || d.Parent() == r.Name) {
		return t.removed(e.Data)
	}
	return t.remove(e.Data)
}

// sceneReport handles what a runtime says on a module's topic: the answers to a creation and a deletion, or a deletion of
// its own, which means that the module has ended.
func (t *transition) sceneReport(topic wire.SceneTopic, e wire.Envelope, d wire.ModuleData) error {
	m := t.get(key{Module, topic.UUID})
	if m == nil {
		return errIgnored
	}
	r := t.get(key{Runtime, m.Parent})
	if r == nil || e.From != r.UUID && (e.From != "" || e.IsRequest() && d.Parent() != r.UUID && d.Parent() != r.Name) {
		return errIgnored
	}
	var answer struct {
		Result  string          `json:"result"`
		Details json.RawMessage `json:"details"`
	}
	if e.IsResponse() {
		if err := json.Unmarshal(e.Data, &answer); err != nil {
			return errors.Join(errIgnored, err)
		}
	}
	switch {
	case e.Action == wire.ActionDelete && e.IsRequest():
	case e.Action == wire.ActionDelete && answer.Result == "ok":
		if fields, err := parse(answer.Details); err == nil {
			d = fields
		}
	case e.Action == wire.ActionCreate && answer.Result != "" && answer.Result != "ok":
		if m.Status != Alive || e.ObjectID != m.Order {
			return errIgnored // a refusal of somebody else's request
		}
		if named, _ := children(t.o.lastBeat(r.UUID).data); named[m.UUID] {
			return errIgnored // the order was repeated, and the module runs
		}
		d = wire.ModuleData{}
		d.Set("status", map[string]any{"code": wire.CodeNotCreated, "reason": reasonExited, "message": refusal(answer.Details)})
	default:
		return errIgnored
	}
	end := d.Without("name", "parent")
	end.Set("type", Module)
	end.Set("uuid", m.UUID)
	return t.exited(r.UUID, end.Bytes())
}

// refusal returns the reason in the answer of a scene-scoped runtime: its "desc", or the whole details.
func refusal(details json.RawMessage) string {
	if d, err := wire.ParseObject(details); err == nil && wire.ModuleData(d).Text("desc") != "" {
		return wire.ModuleData(d).Text("desc")
	}
	return string(details)
}

// hearsScenes reports whether the runtime receives the requests of scene-scoped clients itself: it is scene-scoped, or its
// manager is one of ours.
func (r *Record) hearsScenes() bool {
	var hears bool
	return r.Scene != "" || json.Unmarshal(r.Data["scenes"], &hears) == nil && hears
}

// answersClient reports whether the orchestrator has to answer the module's client on the module's topic. A scene-scoped
// runtime does that itself, and so does a runtime that got the client's own request.
func (t *transition) answersClient(m *Record) bool {
	if m.Scene == "" || m.Direct {
		return false
	}
	r := t.get(key{Runtime, m.Parent})
	return r == nil || r.Scene == ""
}

// notifyClient tells a scene-scoped client that its module has ended: by the answer to its request, or by a deletion.
func (t *transition) notifyClient(m *Record) {
	if m.Status != Dead || !t.answersClient(m) {
		return
	}
	d := m.message(wire.ActionDelete)
	d.Set("name", m.Name)
	d.Set("parent", m.Parent)
	if fields, err := wire.ParseObject(m.Exit); err == nil && fields["status"] != nil {
		d["status"] = fields["status"]
	}
	e := request(wire.ActionDelete, d, true)
	if m.Asked != "" {
		answer := wire.ModuleData{"details": d.Bytes()}
		answer.Set("result", "ok")
		e.ObjectID, e.Type, e.Data = m.Asked, wire.ResponseLater, answer.Bytes()
	}
	t.publish(t.o.config.Topics.SceneModule(m.Scene, m.UUID), t.o.sign(e))
}

// refuseScene answers a refused message of a scene-scoped peer: a request about a module on the module's topic, another
// message on the runtime's.
func (o *Orchestrator) refuseScene(ctx context.Context, topic wire.SceneTopic, e wire.Envelope, err error) {
	if !e.IsRequest() {
		return
	}
	o.deciding.Lock()
	defer o.deciding.Unlock()
	to := o.config.Topics.SceneRuntime(topic.Namespace, topic.UUID)
	if topic.Scene != "" {
		to = o.config.Topics.SceneModule(topic.Scene, topic.UUID)
		if d, err := wire.ParseModuleData(e.Data); err == nil && wire.ValidName("uuid", d.UUID()) == nil {
			to = o.config.Topics.SceneModule(d.FromScene(topic).Scene(), d.UUID())
		}
	}
	answer := wire.ModuleData{"details": complaint(e.Data, err).Bytes()}
	answer.Set("result", "error")
	o.publish(ctx, message{topic: to, payload: o.sign(e.Answer(answer.Bytes())).Bytes()})
}

// sign sets the sender of a message to scene-scoped peers.
func (o *Orchestrator) sign(e wire.Envelope) wire.Envelope {
	e.From = o.uuid
	return e
}

// orderTo returns an order about a module to its runtime, or the runtime's manager, and its topic.
func (o *Orchestrator) orderTo(m, r *Record, action string) (topic string, e wire.Envelope) {
	d := m.message(action)
	if r.Scene == "" {
		return o.config.Topics.ControlOf(r.UUID), request(action, d, r.Later)
	}
	if action == wire.ActionCreate {
		d = d.ToScene()
	} else {
		d.Set("name", m.Name)
	}
	d.Set("parent", r.UUID)
	return o.config.Topics.SceneControl(m.sceneOf(), r.UUID, m.UUID), o.sign(request(action, d, true))
}

// sceneOf returns the scene of a module on a scene-scoped runtime.
func (r *Record) sceneOf() string {
	if scene := r.Data.Scene(); scene != "" {
		return scene
	}
	return wire.DefaultScene
}

// children returns the uuids of the modules that a keepalive names. It reports false for a list in other words than those of
// scene-scoped peers.
func children(d wire.ModuleData) (uuids map[string]bool, ok bool) {
	var list []*struct {
		UUID string `json:"uuid"`
	}
	if json.Unmarshal(d["children"], &list) != nil || list == nil {
		return nil, false
	}
	uuids = map[string]bool{}
	for _, child := range list {
		if child != nil {
			uuids[child.UUID] = true
		}
	}
	return uuids, true
}

// missing compares the modules of a scene-scoped runtime with those that its keepalive names, except those with a recent order.
// Such a runtime reports ends with QoS 0, so that a report can be lost: a module that it does not name has ended, and one that
// has ended for the record and runs is deleted.
func (t *transition) missing(r *Record, d wire.ModuleData) error {
	named, ok := children(d)
	if r.Scene == "" || !ok {
		return nil
	}
	recent := t.now.Add(-2 * max(time.Duration(t.o.interval(r))*time.Second, t.o.config.KeepaliveInterval))
	for _, m := range t.modulesOf(r.UUID) {
		if m.Unconfirmed || m.Since.After(recent) {
			continue
		}
		if named[m.UUID] && m.Status == Dead {
			t.sendOrder(t.edit(m), r, wire.ActionDelete)
		}
		if named[m.UUID] || m.Status != Alive && m.Status != Exiting {
			continue
		}
		end := wire.ModuleData{}
		end.Set("type", Module)
		end.Set("uuid", m.UUID)
		end.Set("status", map[string]any{"code": wire.CodeKilled, "reason": "killed", "message": "its runtime no longer names it"})
		if err := t.exited(r.UUID, end.Bytes()); err != nil {
			return err
		}
	}
	return nil
}
