package broker_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// described are the properties of a message that a broker passes on.
var described = [][]byte{
	property(payloadFormat, 1), property(contentType, "text/plain"), property(responseTopic, "answer/here"),
	property(correlationData, "\x00\xff data"), property(userProperty, [2]string{"b", "1"}), property(userProperty, [2]string{"a", "2"}),
	property(userProperty, [2]string{"b", "1"}),
}

func checkDescribed(t *testing.T, f frame) {
	t.Helper()
	assert.Equal(t, []any{1}, f.props[payloadFormat])
	assert.Equal(t, []any{"text/plain"}, f.props[contentType])
	assert.Equal(t, []any{"answer/here"}, f.props[responseTopic])
	assert.Equal(t, []any{"\x00\xff data"}, f.props[correlationData])
	assert.Equal(t, []any{[2]string{"b", "1"}, [2]string{"a", "2"}, [2]string{"b", "1"}}, f.props[userProperty])
}

func TestDialogueWills(t *testing.T) {
	will := func(props ...[]byte) *message { return &message{topic: "will", payload: "gone", qos: 1, props: props} }
	with := func(h hello, w *message) hello {
		h.will = w
		return h
	}
	watch := func(t *testing.T, s *server, level byte) *link {
		t.Helper()
		w, _ := login(t, s, level, hello{id: "watch"})
		w.join(2, "will")
		return w
	}
	hold(t, []dialogue{
		// MQTT-3.1.2-8, 3.14.2.1: the will is published unless DISCONNECT had reason code 0.
		{name: "published when the connection is lost", run: levels(func(t *testing.T, s *server, level byte) {
			for qos := range byte(3) {
				w := watch(t, s, level)
				c, _ := login(t, s, level, hello{id: "c", will: &message{topic: "will", payload: "gone", qos: qos}})
				c.cut()
				f := w.receive()
				assert.Equal(t, "gone", f.payload)
				assert.Equal(t, qos, f.qos())
				assert.False(t, f.retain())
				w.leave()
			}
		})},
		{name: "published after an error of the client", run: levels(func(t *testing.T, s *server, level byte) {
			w := watch(t, s, level)
			c, _ := login(t, s, level, hello{id: "c", will: will()})
			c.send([]byte{0x00, 0})
			c.closed()
			assert.Equal(t, "gone", w.receive().payload)
		})},
		// MQTT-3.1.2-10, MQTT-3.14.4-3: discarded with DISCONNECT.
		{name: "not published after DISCONNECT", run: levels(func(t *testing.T, s *server, level byte) {
			w := watch(t, s, level)
			c, _ := login(t, s, level, hello{id: "c", will: will()})
			c.leave()
			w.quiet(w)
			c, _ = login(t, s, level, hello{id: "c"})
			c.cut()
			w.quiet(w)
		})},
		// 3.14.2.1: Disconnect with Will Message.
		{name: "DISCONNECT 0x04 publishes the will", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, hello{id: "c", will: will()})
			c.disconnect(4)
			assert.Equal(t, "gone", w.receive().payload)
		}},
		{name: "DISCONNECT with an error publishes the will", wrong: "only 0x04 does", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, hello{id: "c", will: will()})
			c.disconnect(0x80)
			assert.Equal(t, "gone", w.receive().payload)
		}},
		// 3.1.3.2.2: it goes when the delay has passed or the session ends, whichever is first.
		{name: "delay without a session goes at once", wrong: "waits for the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, hello{id: "c", will: will(property(willDelay, 600))})
			c.cut()
			assert.Equal(t, "gone", w.receive().payload)
		}},
		{name: "session expiry shorter than the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, hello{id: "c", keep: true, will: will(property(willDelay, 600)), props: [][]byte{property(sessionExpiry, 2)}})
			start := time.Now()
			c.cut()
			assert.Equal(t, "gone", w.receive().payload)
			assert.GreaterOrEqual(t, time.Since(start), 900*time.Millisecond, "neither of both was over")
		}},
		{name: "delay is waited for", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 2))))
			start := time.Now()
			c.cut()
			assert.Equal(t, "gone", w.receive().payload)
			assert.GreaterOrEqual(t, time.Since(start), 900*time.Millisecond) // mosquitto rounds to seconds
			c, ack := login(t, s, 5, keeping("c"))
			assert.True(t, ack.session)
			c.leave()
		}},
		{name: "DISCONNECT that ends the session publishes the delayed will", wrong: "waits for the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 600))))
			c.disconnect(4, property(sessionExpiry, 0))
			assert.Equal(t, "gone", w.receive().payload)
		}},
		// MQTT-3.1.2-4, 3.1.3.2.2: Clean Start ends the session.
		{name: "Clean Start within the delay publishes it", wrong: "does not publish it", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 250))))
			c.cut()
			login(t, s, 5, hello{id: "c"})
			assert.Equal(t, "gone", w.receive().payload)
		}},
		// MQTT-3.1.3-9: a connection to the session within the delay suppresses the will.
		{name: "return within the delay suppresses it", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 1))))
			c.cut()
			_, ack := login(t, s, 5, keeping("c"))
			require.True(t, ack.session)
			elapse(2500 * time.Millisecond)
			w.quiet(w)
		}},
		{name: "takeover within the delay suppresses it", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 1))))
			_, ack := login(t, s, 5, keeping("c"))
			require.True(t, ack.session)
			c.closed()
			elapse(2500 * time.Millisecond)
			w.quiet(w)
		}},
		// 3.1.4, non-normative: with Clean Start, or without a delay, a takeover publishes the will.
		{name: "takeover with Clean Start publishes it", wrong: "waits for the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			login(t, s, 5, with(keeping("c"), will(property(willDelay, 600))))
			login(t, s, 5, hello{id: "c"})
			assert.Equal(t, "gone", w.receive().payload)
		}},
		{name: "takeover without a delay publishes it", wrong: "publishes only if the session ends",
			run: levels(func(t *testing.T, s *server, level byte) {
				w := watch(t, s, level)
				login(t, s, level, with(keeping("c"), will()))
				login(t, s, level, keeping("c"))
				assert.Equal(t, "gone", w.receive().payload)
				w.quiet(w)
			})},
		// MQTT-3.1.2-14, -15: Will Retain.
		{name: "retain", run: levels(func(t *testing.T, s *server, level byte) {
			topic := fmt.Sprint("will/", level)
			c, _ := login(t, s, level, hello{id: "c", will: &message{topic: topic, payload: "kept", qos: 1, retain: true}})
			w, _ := login(t, s, level, hello{id: "watch"})
			w.join(1, topic)
			c.cut()
			assert.False(t, w.receive().retain())
			w.join(1, topic)
			assert.True(t, w.receive().retain())
		})},
		{name: "retain of a delayed will", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5,
				with(keeping("c"), &message{topic: "will", payload: "kept", qos: 1, retain: true, props: [][]byte{property(willDelay, 1)}}))
			c.cut()
			assert.False(t, w.receive().retain())
			late := watch(t, s, 5)
			f := late.receive()
			assert.True(t, f.retain())
			assert.Equal(t, "kept", f.payload)
		}},
		// 3.1.3.2: the properties of the will are those of the PUBLISH.
		{name: "properties", run: func(t *testing.T, s *server) {
			for _, delay := range []int{0, 1} {
				w := watch(t, s, 5)
				c, _ := login(t, s, 5,
					with(keeping("c"), will(append([][]byte{property(willDelay, delay), property(messageExpiry, 100)}, described...)...)))
				c.cut()
				f := w.receive()
				checkDescribed(t, f)
				assert.InDelta(t, 100, f.number(messageExpiry, -1), 40)
				assert.LessOrEqual(t, f.number(messageExpiry, -1), 100)
				assert.NotContains(t, f.props, willDelay)
				w.leave()
			}
		}},
		// 3.1.3.2.4: the interval of the will begins when it is published.
		{name: "expiry shorter than the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 3), property(messageExpiry, 2))))
			c.cut()
			assert.Equal(t, "gone", w.receive().payload)
		}},
		// MQTT-3.1.3-11, MQTT-4.7.1-1, MQTT-4.7.3-1, 3.1.3.3: a will topic is a topic name.
		{name: "invalid topic", run: levels(func(t *testing.T, s *server, level byte) {
			w, _ := login(t, s, level, hello{id: "watch"})
			w.join(1, "will/#")
			for _, topic := range []string{"will/#", "will/+", "+", "", "will/\x00", "will/\xff", "will/a+b"} {
				c := dialLink(t, s, level)
				c.send(hello{id: "c", will: &message{topic: topic, qos: 1}}.encode(level))
				refusedConnect(t, c, topic, 0x80, 0x81, 0x82, 0x83, 0x90)
			}
			w.quiet(w)
		})},
		// MQTT-3.1.2-8, 4.1: a will that waits is part of the session.
		{name: "delayed will after a restart", restarts: true, run: func(t *testing.T, s *server) {
			w, _ := login(t, s, 5, keeping("watch"))
			w.join(1, "will")
			c, _ := login(t, s, 5, with(keeping("c"), will(append([][]byte{property(willDelay, 2)}, described...)...)))
			c.disconnect(4)
			s.stop(t)
			s.start(t)
			w, ack := login(t, s, 5, keeping("watch"))
			require.True(t, ack.session)
			checkDescribed(t, w.receive())
		}},
	})
}
