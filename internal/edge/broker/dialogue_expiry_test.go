package broker_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestDialogueMessageExpiry(t *testing.T) {
	expiry := func(seconds int) [][]byte { return [][]byte{property(messageExpiry, seconds)} }
	remaining := func(t *testing.T, f frame) {
		t.Helper()
		assert.Equal(t, "long", f.payload)
		assert.LessOrEqual(t, f.number(messageExpiry, 1000), 99, "the interval less the time that it waited")
		assert.Positive(t, f.number(messageExpiry, 0))
	}
	const wait = 2200 * time.Millisecond
	pause := func(t *testing.T, s *server, restart bool) {
		if restart {
			s.stop(t)
		}
		elapse(wait)
		if restart {
			s.start(t)
		}
	}
	queued := func(restart bool) func(t *testing.T, s *server) {
		return func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, keeping("sub"))
			sub.join(1, "t")
			sub.leave()
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t", payload: "short", qos: 1, props: expiry(1)})
			pub.publish(message{topic: "t", payload: "long", qos: 1, props: expiry(100)})
			pub.publish(message{topic: "t", payload: "endless", qos: 1})
			pause(t, s, restart)
			sub, _ = login(t, s, 5, keeping("sub"))
			remaining(t, sub.receive())
			f := sub.receive()
			assert.Equal(t, "endless", f.payload)
			assert.NotContains(t, f.props, messageExpiry)
		}
	}
	retained := func(restart bool) func(t *testing.T, s *server) {
		return func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t/short", payload: "short", qos: 1, retain: true, props: expiry(1)})
			pub.publish(message{topic: "t/long", payload: "long", qos: 1, retain: true, props: expiry(100)})
			pause(t, s, restart)
			for _, level := range []byte{4, 5} {
				sub, _ := login(t, s, level, hello{id: "sub"})
				sub.join(1, "t/#")
				f := sub.receive()
				assert.Equal(t, "long", f.payload)
				if level == 5 {
					remaining(t, f)
				}
				other, _ := login(t, s, 5, hello{id: "other"})
				sub.quiet(other)
			}
		}
	}
	hold(t, []dialogue{
		// MQTT-3.3.2-5, -6: what is expired is not sent; the interval is what remains.
		{name: "queued", run: queued(false)},
		{name: "queued over a restart", restarts: true, run: queued(true)},
		{name: "retained", run: retained(false)},
		{name: "retained over a restart", restarts: true, run: retained(true)},
		{name: "live", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.join(1, "t")
			c.publish(message{topic: "t", qos: 1, props: expiry(100)})
			n := c.receive().number(messageExpiry, -1)
			assert.LessOrEqual(t, n, 100)
			assert.Positive(t, n)
		}},
		// 3.1.3.2.4: the interval of a will is that of its PUBLISH.
		{name: "will", run: func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, keeping("sub"))
			sub.join(1, "t")
			sub.leave()
			seen, _ := login(t, s, 5, hello{id: "seen"})
			seen.join(1, "t")
			for payload, seconds := range map[string]int{"short": 1, "long": 100} {
				c, _ := login(t, s, 5, hello{id: "c", will: &message{topic: "t", payload: payload, qos: 1, props: expiry(seconds)}})
				c.cut()
				assert.Equal(t, payload, seen.receive().payload)
			}
			elapse(wait)
			sub, _ = login(t, s, 5, keeping("sub"))
			remaining(t, sub.receive())
			sub.quiet(seen)
		}},
		// MQTT-4.3.3-7, -13: what was sent does not expire any more.
		{name: "after it was sent", run: func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, keeping("sub"))
			sub.join(2, "t")
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t", payload: "short", qos: 2, props: expiry(1)})
			f := sub.want(typePublish)
			elapse(wait)
			sub.ack(typePubrec, f.id)
			assert.Equal(t, f.id, sub.want(typePubrel).id)
			sub.ack(typePubcomp, f.id)
			sub.quiet(pub)
		}},
		// A message that waits for Receive Maximum expires too.
		{name: "behind Receive Maximum", wrong: "sends nothing after an expired message", run: func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, hello{id: "sub", props: [][]byte{property(receiveMaximum, 1)}})
			sub.join(1, "t")
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t", payload: "first", qos: 1})
			pub.publish(message{topic: "t", payload: "short", qos: 1, props: expiry(1)})
			pub.publish(message{topic: "t", payload: "long", qos: 1, props: expiry(100)})
			first := sub.want(typePublish)
			elapse(wait)
			sub.ack(typePuback, first.id)
			remaining(t, sub.receive())
		}},
	})
}
