package mqttclients

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience bounds every wait, on a busy machine.
const patience = 30 * time.Second

func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// message is a message as a client sends and receives it. Its properties are those of MQTT 5.
type message struct {
	Topic         string            `json:"topic"`
	Payload       string            `json:"payload"`
	QoS           byte              `json:"qos"`
	Retain        bool              `json:"retain"`
	User          map[string]string `json:"user,omitempty"`
	ContentType   string            `json:"contentType,omitempty"`
	ResponseTopic string            `json:"responseTopic,omitempty"`
	Correlation   string            `json:"correlation,omitempty"`
	Expiry        uint32            `json:"expiry,omitempty"`     // seconds
	UTF8          bool              `json:"utf8,omitempty"`       // the payload format indicator
	Identifier    int               `json:"identifier,omitempty"` // of the subscription; only in received messages
}

// will is a last will.
type will struct {
	Topic   string `json:"topic"`
	Payload string `json:"payload"`
	QoS     byte   `json:"qos"`
	Retain  bool   `json:"retain"`
	Delay   uint32 `json:"delay,omitempty"` // seconds; MQTT 5
}

// subscription is a subscription. MQTT 3.1.1 has only the first two fields.
type subscription struct {
	Filter            string `json:"filter"`
	QoS               byte   `json:"qos"`
	NoLocal           bool   `json:"noLocal,omitempty"`
	RetainAsPublished bool   `json:"retainAsPublished,omitempty"`
	RetainHandling    byte   `json:"retainHandling,omitempty"`
	Identifier        int    `json:"identifier,omitempty"`
}

// options are those of a connection. The subscriptions of one connection have the same QoS.
type options struct {
	Client    string `json:"client"` // the client identifier
	Port      int    `json:"port"`   // on 127.0.0.1
	WebSocket bool   `json:"webSocket"`
	Protocol  int    `json:"protocol"`
	Clean     bool   `json:"clean"`
	Expiry    uint32 `json:"expiry,omitempty"` // of the session, in seconds; MQTT 5
	// ReceiveMaximum is the number of messages with QoS 1 and 2 at a time, or 0 for the client's default; MQTT 5.
	ReceiveMaximum uint16         `json:"receiveMaximum,omitempty"`
	Will           *will          `json:"will,omitempty"`
	Subscriptions  []subscription `json:"subscriptions,omitempty"` // made once, after the first connection
}

// program makes connections with one client implementation.
type program interface {
	// connect returns once the connection is up and the subscriptions are granted. The client reconnects by itself until
	// disconnect, which is needed after an error as well, unless the connection is nil. What happens is reported to the inbox.
	connect(t testing.TB, o options, in *inbox) (connection, error)
}

// connection is a client with a connection, or between two connections.
type connection interface {
	// publish sends messages without waiting between them, and returns once all are acknowledged as their QoS demands.
	publish(ctx context.Context, messages ...message) error
	// disconnect sends DISCONNECT if the connection is up, and ends the client. The reason code is 4 if the will is wanted,
	// otherwise the client's default.
	disconnect(ctx context.Context, wantWill bool) error
}

// inbox collects what a client reports.
type inbox struct {
	mu       sync.Mutex
	messages []message
	sessions []*bool // one for each CONNACK: whether the broker had the session, or nil if the client does not report it
	changed  chan struct{}
}

func newInbox() *inbox { return &inbox{changed: make(chan struct{})} }

func (i *inbox) update(change func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	change()
	close(i.changed)
	i.changed = make(chan struct{})
}

func (i *inbox) connected(session *bool) {
	i.update(func() { i.sessions = append(i.sessions, session) })
}

func (i *inbox) received(m message) {
	if len(m.User) == 0 {
		m.User = nil // some clients report an empty map
	}
	i.update(func() { i.messages = append(i.messages, m) })
}

// all returns the messages so far.
func (i *inbox) all() []message {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.messages)
}

// wait waits until holds returns true for what the inbox has. It fails the test after patience.
func (i *inbox) wait(t testing.TB, what string, holds func(messages []message, sessions []*bool) bool) {
	t.Helper()
	for deadline := time.After(patience); ; {
		i.mu.Lock()
		ok, changed, count := holds(i.messages, i.sessions), i.changed, len(i.messages)
		i.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			require.FailNowf(t, "not in time", "%s: %d messages", what, count)
		}
	}
}

// until waits for a message with this payload, and returns the messages before it.
func (i *inbox) until(t testing.TB, payload string) (before []message) {
	t.Helper()
	i.wait(t, "a message "+payload, func(messages []message, _ []*bool) bool {
		for n, m := range messages {
			if m.Payload == payload {
				before = slices.Clone(messages[:n])
				return true
			}
		}
		return false
	})
	return before
}

// reconnected waits for the nth connection, and returns whether the broker had the session.
func (i *inbox) reconnected(t testing.TB, n int) (session *bool) {
	t.Helper()
	i.wait(t, "a connection", func(_ []message, sessions []*bool) bool {
		if len(sessions) < n {
			return false
		}
		session = sessions[n-1]
		return true
	})
	return session
}
