package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

const (
	managerID = "22222222-0000-4000-8000-000000000001"
	runtimeA  = "11111111-0000-4000-8000-00000000000a"
	runtimeB  = "11111111-0000-4000-8000-00000000000b"

	patience = 8 * time.Second
)

var topics = wire.Topics{Realm: "realm"}

// bus is the test's broker for the manager's client and the test.
type bus struct {
	mu       sync.Mutex
	clients  []*busClient
	retained map[string]mqtt.Message
	log      []mqtt.Message // what was published, in its order
	grew     chan struct{}  // closed and replaced with each message
	away     bool           // clients do not connect by themselves
	silent   bool           // no orchestrator answers
	later    bool           // the orchestrator is a later peer
	stalled  chan struct{}  // if set, Publish with QoS 0 waits until it is closed, like a write to a slow broker
	refuse   string         // the result that the orchestrator answers
	answered map[string]bool
}

func newBus() *bus {
	return &bus{retained: map[string]mqtt.Message{}, grew: make(chan struct{}), answered: map[string]bool{}}
}

// busClient is a connection to the bus. Like the real client, it queues QoS 1 and 2 while it is disconnected.
type busClient struct {
	bus     *bus
	config  mqtt.Config
	filters map[string]byte
	up      bool
	closed  bool
	end     context.CancelFunc
	queued  []mqtt.Message
	waiting []func(delivered bool) // settles the queued messages
	dropped uint64
	full    bool // the broker's window is full: queued messages wait
	inbox   chan mqtt.Message
	wg      sync.WaitGroup
}

func (b *bus) dial(c mqtt.Config) (mqtt.Client, error) {
	cl := &busClient{bus: b, config: c, filters: map[string]byte{}, inbox: make(chan mqtt.Message, 1<<14)}
	b.mu.Lock()
	b.clients = append(b.clients, cl)
	b.mu.Unlock()
	cl.wg.Go(func() {
		for msg := range cl.inbox {
			c.Handler(msg)
		}
	})
	if !b.away {
		cl.connect()
	}
	return cl, nil
}

func (c *busClient) connect() {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	if c.up || c.closed {
		return
	}
	c.up = true
	if !c.full {
		for _, m := range c.queued {
			c.bus.route(c, m)
		}
		c.settle(true)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c.end = cancel
	c.wg.Go(func() { c.config.OnConnect(ctx, false) })
}

// settle empties the queue. The caller holds the bus's mu.
func (c *busClient) settle(delivered bool) {
	for _, settled := range c.waiting {
		settled(delivered)
	}
	c.queued, c.waiting = nil, nil
}

// disconnect breaks the connection; the broker publishes the will.
func (c *busClient) disconnect() {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	c.up = false
	c.end()
	if w := c.config.Will; w != nil {
		c.bus.route(c, mqtt.Message{Topic: w.Topic, Payload: w.Payload, QoS: w.QoS, Retain: w.Retain})
	}
}

// route delivers a message to all subscribers except its publisher. The caller holds the lock.
func (b *bus) route(from *busClient, m mqtt.Message) {
	b.log = append(b.log, m)
	close(b.grew)
	b.grew = make(chan struct{})
	if m.Retain {
		b.retained[m.Topic] = m
	}
	live := m
	live.Retain = false
	for _, c := range b.clients {
		if c != from {
			c.give(live)
		}
	}
	b.orchestrate(m)
}

func (c *busClient) give(m mqtt.Message) {
	for filter, qos := range c.filters {
		if c.up && channel.Covers(filter, m.Topic) {
			m.QoS = min(m.QoS, qos)
			c.inbox <- m
			return
		}
	}
}

// orchestrate answers registrations.
func (b *bus) orchestrate(m mqtt.Message) {
	e, err := wire.ParseEnvelope(m.Payload)
	if err != nil || b.silent || len(wire.Cut(m.Topic, "realm/proc/reg")) != 1 || e.Action != wire.ActionCreate || !e.IsRequest() {
		return
	}
	result := "ok"
	if b.refuse != "" {
		result = b.refuse
	}
	answer := e.Answer(object(map[string]any{"result": result, "details": map[string]any{"ka_interval_sec": 60, "status": "A"}}))
	if answer.Type = wire.Response; b.later { // whatever the request has
		answer.Type = wire.ResponseLater
	}
	b.route(nil, mqtt.Message{Topic: m.Topic, Payload: answer.Bytes(), QoS: 2})
}

func (c *busClient) Publish(ctx context.Context, topic string, qos byte, retain bool, payload []byte) error {
	return c.PublishThen(ctx, topic, qos, retain, payload, nil)
}

// PublishThen settles a message when the bus has it.
func (c *busClient) PublishThen(ctx context.Context, topic string, qos byte, retain bool, payload []byte, settled func(bool)) error {
	if err := channel.ValidTopic(topic); err != nil {
		return err
	}
	if stalled := c.bus.stalled; stalled != nil && qos == 0 {
		select {
		case <-stalled:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	m := mqtt.Message{Topic: topic, Payload: payload, QoS: qos, Retain: retain}
	if settled == nil {
		settled = func(bool) {}
	}
	switch {
	case c.closed:
		return fmt.Errorf("closed: %w", errdefs.ErrFailedPrecondition)
	case c.up:
		c.bus.route(c, m)
		settled(true)
	case qos == 0:
		return fmt.Errorf("away: %w", errdefs.ErrUnavailable)
	default:
		c.queued, c.waiting = append(c.queued, m), append(c.waiting, settled)
	}
	return nil
}

func (c *busClient) Subscribe(_ context.Context, filter string, qos byte, _ mqtt.SubscribeOptions) error {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	if c.closed {
		return fmt.Errorf("closed: %w", errdefs.ErrFailedPrecondition)
	}
	c.filters[filter] = qos
	for _, m := range c.bus.retained {
		if channel.Covers(filter, m.Topic) && len(m.Payload) > 0 {
			c.inbox <- m
		}
	}
	return nil
}

func (c *busClient) Unsubscribe(_ context.Context, filter string) error {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	delete(c.filters, filter)
	return nil
}

func (c *busClient) Connected() bool {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	return c.up
}

func (c *busClient) WaitConnected(ctx context.Context) error {
	return poll(ctx, c.Connected)
}

func (c *busClient) Stats() mqtt.Stats {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	return mqtt.Stats{Queued: len(c.queued), Dropped: c.dropped}
}

func (c *busClient) Close(context.Context) error {
	c.bus.mu.Lock()
	c.closed, c.up = true, false
	if c.end != nil {
		c.end()
	}
	close(c.inbox)
	c.bus.clients = slices.DeleteFunc(c.bus.clients, func(o *busClient) bool { return o == c })
	c.bus.mu.Unlock()
	c.wg.Wait()
	return nil
}

// publish publishes a message from another client.
func (b *bus) publish(topic string, retain bool, payload []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.route(nil, mqtt.Message{Topic: topic, Payload: payload, QoS: 2, Retain: retain})
}

// find waits for the n-th message (the first is 1) on a topic for which the condition holds.
func (b *bus) find(t testing.TB, topic string, n int, what func(m mqtt.Message) bool) mqtt.Message {
	t.Helper()
	timeout := time.After(patience)
	for {
		b.mu.Lock()
		seen, grew := 0, b.grew
		var all []string
		for _, m := range b.log {
			if m.Topic == topic && (what == nil || what(m)) {
				if seen++; seen == n {
					b.mu.Unlock()
					return m
				}
			}
			all = append(all, fmt.Sprintf("%s %s", m.Topic, m.Payload))
		}
		b.mu.Unlock()
		select {
		case <-grew:
		case <-timeout:
			for _, line := range all {
				t.Log(line)
			}
			t.Fatalf("no message %d on %s", n, topic)
		}
	}
}

// count returns the number of messages so far for which the condition holds.
func (b *bus) count(what func(m mqtt.Message) bool) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, m := range b.log {
		if what(m) {
			n++
		}
	}
	return n
}

// first returns the first message so far for which the condition holds.
func (b *bus) first(what func(m mqtt.Message) bool) mqtt.Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.IndexFunc(b.log, what); i >= 0 {
		return b.log[i]
	}
	return mqtt.Message{}
}

func isAction(action string) func(mqtt.Message) bool {
	return func(m mqtt.Message) bool {
		e, err := wire.ParseEnvelope(m.Payload)
		return err == nil && e.Action == action && e.IsRequest()
	}
}

// isExit matches an exited message of the module.
func isExit(uuid string) func(mqtt.Message) bool {
	return func(m mqtt.Message) bool {
		e, err := wire.ParseEnvelope(m.Payload)
		if err != nil || e.Action != wire.ActionExited {
			return false
		}
		data, err := wire.ParseModuleData(e.Data)
		return err == nil && data.UUID() == uuid
	}
}

// isError matches an error answer.
func isError(m mqtt.Message) bool {
	e, err := wire.ParseEnvelope(m.Payload)
	return err == nil && e.Action == wire.ActionError && e.IsResponse()
}

// dataOf decodes the data of a message.
func dataOf(t testing.TB, m mqtt.Message) map[string]any {
	t.Helper()
	e, err := wire.ParseEnvelope(m.Payload)
	if err != nil {
		t.Fatal(err)
	}
	var data map[string]any
	if err := json.Unmarshal(e.Data, &data); err != nil {
		t.Fatalf("%s: %v", m.Payload, err)
	}
	return data
}
