package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/twin"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/loglimit"
	"github.com/tripod-run/tripod/internal/node/store"
)

// Manager is the running MQTT front door of a node.
type Manager struct {
	config Config
	log    *slog.Logger
	store  *store.Store
	client mqtt.Client
	router *channel.Router
	hosts  []*host
	exits  *exits
	logs   *keptLogs
	counts *counts
	twin   *twin.Guard

	out  *outQueue   // messages of channels to the broker
	subs *subscriber // subscriptions of channels

	logRequests chan logRequest

	ready      chan struct{} // closed once the fields that the client's handlers need are set
	answers    answers       // registrations that wait for an answer
	registered atomic.Bool
	later      atomic.Bool // the orchestrator is a later peer; it refuses the requests of others without a word to them
	reconnects atomic.Bool // this daemon or an earlier one has been connected before

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once
}

// Open starts a manager, its runtimes and the recorded modules, and waits for none of them. The manager registers once
// the broker and the orchestrator are available.
func Open(c Config) (*Manager, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	m := &Manager{config: c, log: c.Log, counts: newCounts(), exits: newExits(), logs: &keptLogs{dir: filepath.Join(c.Root, "edge", "logs")},
		ready: make(chan struct{})}
	m.logRequests = make(chan logRequest, logRequests)
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.out, m.subs = newOutQueue(m), newSubscriber(m)
	m.router = channel.NewRouter(channel.RouterOptions{Publish: m.out.publish, Subscribe: m.subs.add, Unsubscribe: m.subs.remove,
		Held: c.filters()})
	for _, rt := range c.Runtimes {
		m.hosts = append(m.hosts, newHost(m, rt))
	}
	var err error
	if m.store, err = openStore(c.Root); err != nil {
		m.cancel()
		return nil, err
	}
	m.reconnects.Store(!m.store.Fresh())
	if err := m.load(); err != nil {
		m.cancel()
		return nil, errors.Join(err, m.store.Close())
	}
	if m.client, err = c.Dial(m.mqttConfig()); err != nil {
		m.cancel()
		return nil, errors.Join(fmt.Errorf("the edge manager's broker: %w", err), m.store.Close())
	}
	close(m.ready)
	m.out.start()
	m.wg.Go(guard.Loop(m.log, "edge subscriptions", m.subs.run))
	m.wg.Go(guard.Loop(m.log, "edge exits", m.exits.run(m)))
	m.wg.Go(guard.Loop(m.log, "edge logs", m.answerLogs))
	for _, h := range m.hosts {
		h.start()
	}
	return m, nil
}

// mqttConfig returns the client's configuration. The handlers wait until Open has set the client.
func (m *Manager) mqttConfig() mqtt.Config {
	c := m.config.MQTT
	if c.ClientID == "" {
		c.ClientID = "tripod-manager-" + m.config.UUID
	}
	if c.Log == nil {
		c.Log = m.log
	}
	c.NoLocal = true
	c.Will = &mqtt.Will{Topic: m.config.Topics.Reg(m.config.UUID), Payload: m.request(wire.ActionDelete, m.identity()).Bytes(), QoS: 2}
	c.Handler = m.handle
	m.twin = twin.New(twin.Guard{
		Topic: m.config.Topics.Reg(m.config.UUID), UUID: m.config.UUID, Name: m.config.Name, Broker: c, Connect: m.config.Dial,
		Timeout: m.config.RegisterTimeout, Found: m.foundTwin, Log: m.log,
	})
	c.OnTakenOver = m.twin.Wait
	c.OnConnect = m.connected
	c.OnDisconnect = func(err error) {
		m.registered.Store(false)
		m.log.Warn("edge: connection to the broker lost", "err", err)
	}
	return c
}

// foundTwin is called when another node has this manager's identity.
func (m *Manager) foundTwin(other twin.Process) {
	m.refuse("twin", "another node has the identity of this one: is its disk a clone? Only one of them can be connected. On the other one, remove "+
		"edge/identity.json and edge/manager.db below its root directory", "uuid", other.UUID, "name", other.Name, "host", other.Host,
		"connected", !other.Question)
}

// Close unregisters the node, and ends the connection and the runtimes. Modules of durable runtimes keep running, and
// the next Open adopts them.
func (m *Manager) Close(ctx context.Context) error {
	var err error
	m.once.Do(func() { err = m.close(ctx) })
	return err
}

func (m *Manager) close(ctx context.Context) error {
	m.cancel() // from here on, no module is created and nothing is registered
	m.out.flush(ctx)
	if m.client.Connected() {
		for _, h := range m.hosts {
			if h.isUp() {
				m.publish(ctx, m.config.Topics.Reg(h.info.UUID), 2, false, m.request(wire.ActionDelete, h.identity()).Bytes())
				h.announce(ctx, wire.ActionDelete)
			}
		}
		m.publish(ctx, m.config.Topics.Reg(m.config.UUID), 2, false, m.request(wire.ActionDelete, m.identity()).Bytes())
	}
	err := m.client.Close(ctx)
	for _, h := range m.hosts {
		err = errors.Join(err, h.rt.Close())
	}
	done := make(chan struct{})
	go func() { m.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		err = errors.Join(err, fmt.Errorf("the edge manager's runtimes did not end in time: %w", context.Cause(ctx)))
	}
	m.out.stop()
	return errors.Join(err, m.store.Close())
}

// handle handles a message from the broker. If the message is an order, handle returns once the order is recorded.
func (m *Manager) handle(msg mqtt.Message) {
	<-m.ready
	topics := m.config.Topics
	for _, h := range m.hosts {
		control := topics.ControlOf(h.info.UUID)
		switch {
		case msg.Topic == control || msg.Topic == control+"/"+h.info.UUID:
			h.control(msg)
		case msg.Topic == topics.LogRequest(h.info.UUID):
			h.askLog(msg)
		case msg.Topic == topics.Reg(h.info.UUID):
			m.answers.take(m, msg.Payload)
		case msg.Topic == topics.Desired(h.info.UUID):
			h.setDesired(msg.Payload)
		}
	}
	if msg.Topic == topics.Reg(m.config.UUID) {
		if answer := m.twin.Hear(msg.Payload); answer != nil {
			m.publish(m.ctx, msg.Topic, 1, false, answer)
		} else {
			m.answers.take(m, msg.Payload)
		}
	}
	if scene, ok := topics.ParseScene(msg.Topic); ok {
		m.sceneMessage(scene, msg)
	}
	if msg.Retain {
		m.router.RetainedFromBroker(msg.Topic, msg.Payload)
	} else {
		m.router.FromBroker(msg.Topic, msg.Payload)
	}
}

func (m *Manager) host(uuid string) *host {
	for _, h := range m.hosts {
		if h.info.UUID == uuid {
			return h
		}
	}
	return nil
}

// publish sends a message of the manager itself. It logs and counts a failure.
func (m *Manager) publish(ctx context.Context, topic string, qos byte, retain bool, payload []byte) {
	if err := m.client.Publish(ctx, topic, qos, retain, payload); err != nil {
		m.drop(loss{reason: "publish", topic: topic}, 1, err)
	}
}

// fail answers a failed request on the error topic, with the message type that the requester uses.
func (m *Manager) fail(reason string, e wire.Envelope, data any, err error) {
	m.refuse(reason, "control message refused", "err", err)
	if e.Type == "" {
		e.Type = wire.RequestType(m.later.Load())
	}
	answer := e.Answer(object(map[string]any{"desc": err.Error(), "data": data}))
	answer.Action = wire.ActionError
	if answer.ObjectID == "" {
		answer.ObjectID = newID()
	}
	m.publish(m.ctx, m.config.Topics.Errors(), 2, false, answer.Bytes())
}

// refuse counts a failure, and logs it if mayLog allows.
func (m *Manager) refuse(reason, what string, args ...any) {
	m.counts.refused.WithLabelValues(reason).Inc()
	if m.counts.mayLog(reason, time.Now()) {
		m.log.Warn("edge: "+what, append([]any{"reason", reason}, args...)...)
	}
}

// drop counts n dropped messages, and logs them if the limit of the log lines allows. The error says why, if anything is
// known besides the reason.
func (m *Manager) drop(l loss, n int, err error) {
	m.counts.dropped.WithLabelValues(l.reason).Add(float64(n))
	l.topic = loglimit.Text(l.topic)
	if n = m.counts.losses.Add(l, n, time.Now()); n == 0 {
		return
	}
	args := []any{"reason", l.reason, "module", l.module, "topic", l.topic, "messages", n}
	if err != nil {
		args = append(args, "err", err)
	}
	m.log.Warn("edge: messages dropped", args...)
}
