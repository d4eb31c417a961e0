package edgetest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// RuntimeInfo has the fields of a runtime's registration.
type RuntimeInfo struct {
	UUID, Name, Type string
	APIs             []string
	MaxModules       int // 0 means that the field is not sent, as in the recorded session
}

// ManagerConfig configures a Manager.
type ManagerConfig struct {
	URL, Realm, UUID, Name string
	Runtimes               []RuntimeInfo
	Later                  bool // use the type "req" of later peers instead of "arts_req"
}

// Manager imitates the public manager, with runtimes that run the modules of module.go.
type Manager struct {
	cfg  ManagerConfig
	peer *Peer

	mu       sync.Mutex
	runtimes map[string]*foreignRuntime
}

// foreignRuntime is a runtime of a Manager.
type foreignRuntime struct {
	m       *Manager
	info    RuntimeInfo
	modules map[int]*module           // by index
	open    map[[2]int]foreignChannel // by index and channel
}

type foreignChannel struct {
	topic string
	flags byte
}

// StartManager connects and registers: the manager first, then its runtimes.
func StartManager(ctx context.Context, cfg ManagerConfig) (*Manager, error) {
	m := &Manager{cfg: cfg, runtimes: map[string]*foreignRuntime{}}
	will := Line{Topic: reg(cfg.Realm, cfg.UUID), QoS: 2,
		Payload: m.message("delete", object{"type": "manager", "uuid": cfg.UUID, "name": cfg.Name})}
	var err error
	if m.peer, err = Dial(PeerOptions{URL: cfg.URL, ID: "edgetest-manager-" + cfg.Name, Will: &will}); err != nil {
		return nil, err
	}
	if err := m.start(ctx); err != nil {
		m.peer.Close()
		return nil, err
	}
	return m, nil
}

func (m *Manager) start(ctx context.Context) error {
	if err := m.register(ctx, object{"type": "manager", "uuid": m.cfg.UUID, "name": m.cfg.Name}); err != nil {
		return err
	}
	for _, info := range m.cfg.Runtimes {
		rt := &foreignRuntime{m: m, info: info, modules: map[int]*module{}, open: map[[2]int]foreignChannel{}}
		m.runtimes[info.UUID] = rt
		if err := m.peer.Subscribe(ctlOf(m.cfg.Realm, info.UUID), rt.handle); err != nil {
			return err
		}
		data := object{"type": "runtime", "uuid": info.UUID, "name": info.Name, "runtime_type": info.Type, "apis": info.APIs,
			"parent": m.cfg.UUID}
		if info.MaxModules > 0 {
			data["max_nmodules"] = info.MaxModules
		}
		if err := m.register(ctx, data); err != nil {
			return err
		}
	}
	return nil
}

func (m *Manager) message(action string, data object) []byte {
	return Message("", action, kind(m.cfg.Later), data)
}

// register sends a registration every 5 s until there is an answer.
func (m *Manager) register(ctx context.Context, data object) error {
	topic := reg(m.cfg.Realm, data["uuid"].(string))
	answers := make(chan envelope, 16)
	if err := m.peer.Subscribe(topic, func(l Line) {
		var e envelope
		if json.Unmarshal(l.Payload, &e) == nil && (e.Type == "arts_resp" || e.Type == "resp") {
			answers <- e
		}
	}); err != nil {
		return err
	}
	for {
		request := m.message("create", data)
		var asked envelope
		if err := json.Unmarshal(request, &asked); err != nil {
			return err
		}
		if err := m.peer.Publish(topic, 0, request); err != nil {
			return err
		}
		resend := time.After(5 * time.Second)
		for expired := false; !expired; {
			select {
			case e := <-answers:
				if e.ObjectID == asked.ObjectID && e.Data["result"] == "ok" {
					return nil
				}
			case <-resend:
				expired = true
			case <-ctx.Done():
				return fmt.Errorf("register %s: no answer: %w", data["uuid"], ctx.Err())
			}
		}
	}
}

// Keepalive sends a keepalive of the runtime, with the fields of the recorded session.
func (m *Manager) Keepalive(runtime string) error {
	m.mu.Lock()
	rt := m.runtimes[runtime]
	children := slices.Sorted(maps.Keys(rt.modules))
	m.mu.Unlock()
	return m.peer.Publish(m.cfg.Realm+"/proc/keepalive/"+runtime, 0, m.message("update", object{
		"type": "runtime", "uuid": runtime, "apis": rt.info.APIs, "name": rt.info.Name, "children": children,
	}))
}

// Close unregisters and disconnects.
func (m *Manager) Close() error {
	err := m.peer.Publish(reg(m.cfg.Realm, m.cfg.UUID), 0,
		m.message("delete", object{"type": "manager", "uuid": m.cfg.UUID, "name": m.cfg.Name}))
	m.peer.Close()
	return err
}

// Kill drops the connection; the last will unregisters the manager.
func (m *Manager) Kill() { m.peer.Kill() }

// handle handles a message on the runtime's control topic.
func (rt *foreignRuntime) handle(l Line) {
	var e envelope
	if json.Unmarshal(l.Payload, &e) != nil || !e.request() {
		return
	}
	switch e.Action {
	case "create":
		rt.create(e)
	case "delete":
		rt.m.mu.Lock()
		var found *module
		for _, m := range rt.modules {
			if m.uuid == e.text("uuid") {
				found = m
			}
		}
		rt.m.mu.Unlock()
		if found != nil {
			found.exit(`{"status": "killed"}`)
		}
	}
}

func (rt *foreignRuntime) create(e envelope) {
	rt.m.mu.Lock()
	index := 0
	for rt.modules[index] != nil {
		index++
	}
	e.Data["index"] = index
	b, _ := json.Marshal(e.Data)
	m, err := newModule(b, rt)
	if err == nil {
		rt.modules[index] = m
	}
	rt.m.mu.Unlock()
	if err == nil {
		m.start()
	}
}

func (rt *foreignRuntime) topic(kind string, levels ...string) string {
	t := rt.m.cfg.Realm + "/proc/" + kind
	for _, l := range levels {
		t += "/" + l
	}
	return t
}

// control handles a module's control message. It ignores connection errors, because the test notices the missing
// message.
func (rt *foreignRuntime) control(m *module, msg int, payload []byte) {
	peer, uuid := rt.m.peer, rt.info.UUID
	switch msg {
	case msgOpen:
		rt.openChannel(m, int(payload[0]), payload[1], string(payload[2:]))
	case msgClose:
		rt.m.mu.Lock()
		delete(rt.open, [2]int{m.index, int(payload[0])})
		rt.m.mu.Unlock()
	case msgModuleLog:
		_ = peer.Publish(rt.topic("log", uuid, m.uuid), 0, payload)
	case msgProfile:
		_ = peer.Publish(rt.topic("profile", rt.info.Type[:4], uuid, m.uuid), 0, payload)
	case msgExited:
		data := object{"type": "module", "uuid": m.uuid}
		_ = json.Unmarshal(payload, &data)
		rt.m.mu.Lock()
		delete(rt.modules, m.index)
		for key := range rt.open {
			if key[0] == m.index {
				delete(rt.open, key)
			}
		}
		rt.m.mu.Unlock()
		_ = peer.Publish(rt.topic("control", uuid), 0, rt.m.message("exited", data))
	}
}

func (rt *foreignRuntime) openChannel(m *module, fd int, flags byte, topic string) {
	rt.m.mu.Lock()
	rt.open[[2]int{m.index, fd}] = foreignChannel{topic, flags}
	rt.m.mu.Unlock()
	if flags&flagRead != 0 {
		_ = rt.m.peer.Subscribe(topic, func(l Line) { rt.m.deliver(l.Topic, l.Payload, nil) })
	}
}

// publish sends a module's message to the broker and to the node's other readers.
func (rt *foreignRuntime) publish(m *module, fd int, payload []byte) {
	rt.m.mu.Lock()
	c, ok := rt.open[[2]int{m.index, fd}]
	rt.m.mu.Unlock()
	if !ok {
		return
	}
	_ = rt.m.peer.Publish(c.topic, 0, payload)
	rt.m.deliver(c.topic, payload, m)
}

// deliver delivers a message to the topic's readers, except the given module.
func (m *Manager) deliver(topic string, payload []byte, except *module) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, rt := range m.runtimes {
		for key, c := range rt.open {
			if to := rt.modules[key[0]]; c.topic == topic && c.flags&flagRead != 0 && to != nil && to != except {
				m.peer.later(func() { to.receive(key[1], payload) })
			}
		}
	}
}

func (rt *foreignRuntime) raw([]byte) {}
func (rt *foreignRuntime) die()       { rt.m.Kill() }
