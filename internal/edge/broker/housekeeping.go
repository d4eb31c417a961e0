package broker

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	// systemPrefix begins the topics of the broker itself. Clients may not publish to them.
	systemPrefix = "$SYS/"
	// SessionsTopic has the list of sessions, as JSON: a list of Session, of at most maxSessionsListed. The message is made
	// when a client subscribes to exactly this topic.
	SessionsTopic     = systemPrefix + "broker/sessions"
	maxSessionsListed = 20_000
	// housekeepingInterval is the time between two reports below systemPrefix.
	housekeepingInterval = 10 * time.Second
)

func isSystem(topic string) bool { return strings.HasPrefix(topic, systemPrefix) }

// housekeeping removes expired messages, and publishes the broker's figures below systemPrefix.
func (s *server) housekeeping() {
	began := time.Now()
	tick := time.NewTicker(housekeepingInterval)
	defer tick.Stop()
	for {
		s.removeExpired()
		s.report(time.Since(began))
		select {
		case <-tick.C:
		case <-s.stop:
			return
		}
	}
}

func (s *server) removeExpired() {
	now := time.Now()
	var expired []string
	s.mu.RLock()
	if s.expiring > 0 {
		s.tree.root.below(func(n *node) {
			if n.retained.expired(now) {
				expired = append(expired, n.retained.topic)
			}
		})
	}
	for _, one := range s.sessions { // or they would take the places of others in the queues of absent clients
		one.removeExpired(now)
	}
	s.mu.RUnlock()
	if len(expired) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, topic := range expired {
		if n := s.tree.at(topic, false); n != nil && n.retained != nil && n.retained.expired(now) {
			s.forgetRetained(n)
		}
	}
}

// report publishes figures under the topics that mosquitto uses.
func (s *server) report(uptime time.Duration) {
	st := s.Stats()
	for topic, value := range map[string]any{
		"uptime": fmt.Sprintf("%d seconds", int(uptime.Seconds())), "clients/connected": st.Clients, "clients/total": st.Sessions,
		"subscriptions/count": st.Subscriptions, "retained messages/count": st.Retained, "messages/inflight": st.Inflight,
		"publish/messages/received": st.Received, "publish/messages/sent": st.Sent, "publish/messages/dropped": st.Dropped,
	} {
		// Only a limit could forbid to retain it, and there is none for these topics.
		_ = s.publish(&message{topic: systemPrefix + "broker/" + topic, payload: fmt.Append(nil, value), retain: true}, nil)
	}
}

// Session describes the session of a client, in the message of SessionsTopic.
type Session struct {
	Client    string `json:"client"`
	User      string `json:"user,omitempty"`
	Connected bool   `json:"connected"`
	// Address and Level are those of the connection; Level is 3 for MQTT 3.1, 4 for 3.1.1 and 5 for 5.0.
	Address string `json:"address,omitempty"`
	Level   byte   `json:"level,omitempty"`
	// Since is when the client was last connected; zero while it is.
	Since         time.Time     `json:"since,omitzero"`
	Expiry        time.Duration `json:"expiry"` // how long the session outlives its connection, in nanoseconds
	Subscriptions int           `json:"subscriptions"`
	Queued        int           `json:"queued"` // messages with QoS 1 and 2 that the client has not acknowledged
	QueuedBytes   int64         `json:"queuedBytes"`
}

// describe returns what SessionsTopic says about a session. server.mu is held.
func (s *session) describe() Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := Session{
		Client: s.id, User: s.user, Connected: s.conn != nil, Expiry: s.expiry, Subscriptions: len(s.subs),
		Queued: s.waiting.len() + len(s.flight), QueuedBytes: s.bytes,
	}
	if s.conn != nil {
		d.Address, d.Level = s.conn.RemoteAddr().String(), s.conn.level
	} else {
		d.Since = s.ended
	}
	return d
}

// listSessions makes the message of SessionsTopic.
func (s *server) listSessions() {
	s.mu.RLock()
	all := make([]Session, 0, min(len(s.sessions), maxSessionsListed))
	for _, one := range s.sessions {
		if len(all) == maxSessionsListed {
			break
		}
		all = append(all, one.describe())
	}
	s.mu.RUnlock()
	slices.SortFunc(all, func(a, b Session) int { return cmp.Compare(a.Client, b.Client) })
	text, err := json.Marshal(all) // cannot fail for these structs
	if err == nil {
		_ = s.publish(&message{topic: SessionsTopic, payload: text, retain: true}, nil) // see report
	}
}
