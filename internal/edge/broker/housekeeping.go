package broker

import (
	"fmt"
	"strings"
	"time"
)

const (
	// systemPrefix begins the topics of the broker itself. Clients may not publish to them.
	systemPrefix = "$SYS/"
	// housekeepingInterval is the time between two reports below systemPrefix.
	housekeepingInterval = 10 * time.Second
)

func isSystem(topic string) bool { return strings.HasPrefix(topic, systemPrefix) }

// housekeeping removes expired retained messages, and publishes the broker's figures below systemPrefix.
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
	s.tree.root.below(func(n *node) {
		if n.retained.expired(now) {
			expired = append(expired, n.retained.topic)
		}
	})
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
