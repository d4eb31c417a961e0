package broker

import (
	"time"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// minGrace is the least time that clients have to come back after the broker's start, before their wills are published.
const minGrace = 10 * time.Second

// will is the will of a connection (MQTT 5.0 §3.1.2.5). After the connection it waits in server.wills, if it has a delay.
type will struct {
	client, user string
	number       uint64  // in the store
	message      message // its expiry is not set
	expiry       time.Duration
	delay        time.Duration
	// grace is how long the client of a will without a delay may take to come back after the broker was stopped, which
	// closed its connection without its fault.
	grace    time.Duration
	due      time.Time // zero while the connection lasts
	deferred bool      // the broker was stopped while the connection lasted
	timer    *time.Timer
}

func (s *server) newWill(c *conn, w *packet.Will, keepAlive uint16) *will {
	return &will{
		client: c.id, user: c.user, message: message{
			topic: w.Topic, payload: append([]byte{}, w.Payload...), props: w.Properties.AppendForwarded(nil), qos: w.QoS, retain: w.Retain,
			from: c.id,
		},
		expiry: time.Duration(w.Properties.Number(packet.MessageExpiry)) * time.Second,
		delay:  time.Duration(w.Properties.Number(packet.WillDelay)) * time.Second,
		grace:  max(time.Duration(keepAlive)*time.Second*3/2, minGrace),
	}
}

// takeWill takes the will from the connection; a second call returns nil.
func (c *conn) takeWill() *will {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.will
	c.will = nil
	return w
}

// publishWills publishes wills and removes them from the store, unless their users may not publish to their topics.
func (s *server) publishWills(wills []*will) {
	for _, w := range wills {
		if !s.users.allowed(w.user, w.client, w.message.topic, true) || isSystem(w.message.topic) {
			s.denied.Add(1)
			s.records.deleteWill(w)
			continue
		}
		m := w.message
		if w.expiry > 0 {
			m.expires = time.Now().Add(w.expiry)
		}
		_ = s.publish(&m, func() bool { // it fails at limitRetained, which is in the log
			s.records.deleteWill(w)
			return true
		})
	}
}

// delayWill publishes a will after its delay, unless pullWill is called before. A deferred will stays so on the disk: if the
// broker is stopped once more, the client again has the whole time to come back. server.mu is locked.
func (s *server) delayWill(w *will, delay time.Duration) {
	s.wills[w.client] = w
	if !w.deferred {
		w.due = time.Now().Add(delay)
		s.records.putWill(w)
	}
	w.timer = time.AfterFunc(delay, func() {
		s.mu.Lock()
		current := s.wills[w.client] == w && !s.closing
		if current {
			delete(s.wills, w.client)
		}
		s.mu.Unlock()
		if current {
			s.publishWills([]*will{w})
		}
	})
}

// pullWill takes a client's will that waits for its delay, or returns nil. server.mu is locked.
func (s *server) pullWill(client string) *will {
	w := s.wills[client]
	if w != nil {
		delete(s.wills, client)
		w.timer.Stop()
	}
	return w
}
