package broker_test

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDialogueRetained(t *testing.T) {
	hold(t, []dialogue{
		// 4.7.1.2: # includes the parent level. MQTT-3.3.1-9.
		{name: "filter that includes the parent level", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.publish(message{topic: "a/b", payload: "kept", qos: 1, retain: true})
			for _, filter := range []string{"a/b/#", "+/b/#", "a/+/#", "a/#", "#", "+/+", "a/b"} {
				c.join(1, filter)
				f := c.receive()
				assert.Equal(t, "a/b", f.topic, filter)
				assert.True(t, f.retain(), filter)
				id := c.nextID()
				body := binary.BigEndian.AppendUint16(nil, id)
				if level == 5 {
					body = append(body, 0)
				}
				c.send(packet(0xa2, append(body, str(filter)...)))
				c.want(typeUnsuback)
			}
			for _, filter := range []string{"a", "a/b/+", "a/b/c/#", "+", "b/#"} {
				c.join(1, filter)
			}
			c.quiet(c)
		})},
		// MQTT-4.7.2-1: a filter that begins with a wildcard does not match $ topics.
		{name: "topics that begin with $", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			pub.publish(message{topic: "$app/x", payload: "kept", qos: 1, retain: true})
			for _, filter := range []string{"#", "+/x", "+/#", "+/+"} {
				c, _ := login(t, s, level, hello{id: "c"})
				c.join(1, filter)
				pub.publish(message{topic: "$app/x", payload: "live", qos: 1})
				pub.publish(message{topic: "app/x", qos: 1})
				assert.Equal(t, "app/x", c.receive().topic, filter)
				c.leave()
			}
		})},
		// MQTT-4.7.3-4, MQTT-1.5.4-3: topics are compared byte by byte, and nothing is stripped.
		{name: "topics are not normalized", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			topics := []string{"a/b", "A/b", "a//b", "/a/b", "a/b/", "a/ b", "a/\u00e4", "a/a\u0308", "a/\ufeffb", "\ufeffa/b"}
			for _, topic := range topics {
				c.join(1, topic)
			}
			for _, topic := range topics {
				c.publish(message{topic: topic, qos: 1})
				assert.Equal(t, topic, c.receive().topic)
			}
			c.quiet(c)
		})},
		// MQTT-3.3.1-6, -7: an empty payload removes the message and is delivered as an ordinary one.
		{name: "empty retained message", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.publish(message{topic: "t", payload: "kept", qos: 1, retain: true})
			c.join(1, "t")
			assert.Equal(t, "kept", c.receive().payload)
			c.publish(message{topic: "t", qos: 1, retain: true})
			assert.Empty(t, c.receive().payload)
			late, _ := login(t, s, level, hello{id: "late"})
			late.join(1, "t")
			late.quiet(c)
		})},
		// MQTT-3.3.1-5, -8: the last message with RETAIN stays, one without changes nothing.
		{name: "the last retained message", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.publish(message{topic: "t", payload: "old", qos: 1, retain: true})
			c.publish(message{topic: "t", payload: "new", qos: 2, retain: true})
			c.publish(message{topic: "t", payload: "passing", qos: 1})
			c.join(2, "t")
			f := c.receive()
			assert.Equal(t, "new", f.payload)
			assert.EqualValues(t, 2, f.qos())
			c.quiet(c)
		})},
		// MQTT-3.3.4-3: the subscription identifier comes with every message of the subscription, also a retained one.
		{name: "subscription identifier of a retained message", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.publish(message{topic: "t/1", payload: "m", qos: 1, retain: true})
			c.subscribe(1, [][]byte{property(subscriptionIdentifier, 268_435_455)}, "t/+")
			assert.Equal(t, []any{268_435_455}, c.receive().props[subscriptionIdentifier])
			c.publish(message{topic: "t/1", qos: 1})
			assert.Equal(t, []any{268_435_455}, c.receive().props[subscriptionIdentifier])
		}},
		// MQTT-3.8.4-3: a subscription again replaces the identifier; without one it has none.
		{name: "subscription identifier is replaced", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			for _, props := range [][][]byte{{property(subscriptionIdentifier, 1)}, {property(subscriptionIdentifier, 200)}, nil} {
				c.subscribe(1, props, "t")
				c.publish(message{topic: "t", qos: 1})
				f := c.receive()
				if props == nil {
					assert.NotContains(t, f.props, subscriptionIdentifier)
				} else {
					assert.Len(t, f.props[subscriptionIdentifier], 1)
				}
			}
		}},
		// MQTT-3.3.4-4, -5: all identifiers in one copy, or one in each.
		{name: "identifiers of overlapping subscriptions", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.subscribe(1, [][]byte{property(subscriptionIdentifier, 1)}, "t/+")
			c.subscribe(1, [][]byte{property(subscriptionIdentifier, 2)}, "t/#")
			c.publish(message{topic: "t/1", qos: 1})
			var ids []any
			for len(ids) < 2 {
				ids = append(ids, c.receive().props[subscriptionIdentifier]...)
			}
			assert.ElementsMatch(t, []any{1, 2}, ids)
			c.quiet(c)
		}},
		// MQTT-3.3.1-9, -10, -11: Retain Handling.
		{name: "Retain Handling", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.publish(message{topic: "t", payload: "kept", qos: 1, retain: true})
			c.join(0x20|1, "t")
			c.quiet(c)
			for range 2 {
				c.join(1, "t")
				assert.Equal(t, "kept", c.receive().payload, "0: at each subscription")
			}
			c.join(0x10|1, "t")
			c.quiet(c) // 1: the subscription is not new
			c.join(0x10|1, "+")
			assert.Equal(t, "kept", c.receive().payload, "1: at a new subscription")
			c.join(0x10|1, "+")
			c.quiet(c)
		}},
		// MQTT-3.3.1-12, -13: Retain As Published; a retained message at SUBSCRIBE has RETAIN.
		{name: "Retain As Published", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			for _, option := range []byte{0, 8} {
				c, _ := login(t, s, 5, hello{id: fmt.Sprint("c", option)})
				c.join(option|1, fmt.Sprint("t/", option))
				for _, retain := range []bool{true, false} {
					pub.publish(message{topic: fmt.Sprint("t/", option), qos: 1, payload: "m", retain: retain})
					assert.Equal(t, retain && option == 8, c.receive().retain())
				}
				c.join(option|1, fmt.Sprint("t/", option))
				assert.True(t, c.receive().retain())
			}
		}},
		// MQTT-3.8.3-3: No Local, for the connection that published.
		{name: "No Local", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.join(4|1, "t")
			other, _ := login(t, s, 5, hello{id: "other"})
			c.publish(message{topic: "t", payload: "own", qos: 1})
			other.publish(message{topic: "t", payload: "other's", qos: 1})
			assert.Equal(t, "other's", c.receive().payload)
			c.quiet(other)
		}},
		// 4.8.2: a shared subscription gets no retained messages when it begins.
		{name: "shared subscription gets no retained messages", wrong: "sends them", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.publish(message{topic: "t", payload: "kept", qos: 1, retain: true})
			c.join(1, "$share/g/t")
			c.quiet(c)
		}},
		// 3.3.2.3: properties of the message are kept, in order; MQTT-3.3.2-4, -15, -16, -17, -18, -20.
		{name: "properties of a message are passed on", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.publish(message{topic: "t", payload: "m", qos: 1, retain: true, props: described})
			c.join(1, "t")
			checkDescribed(t, c.receive())
			c.publish(message{topic: "t", payload: "m", qos: 1, props: described})
			checkDescribed(t, c.receive())
			four, _ := login(t, s, 4, hello{id: "four"})
			four.join(1, "t")
			assert.Equal(t, "m", four.receive().payload)
		}},
		// MQTT-3.3.1-9: all of them, however many.
		{name: "10000 retained messages with QoS 0", wrong: "loses some", run: func(t *testing.T, s *server) { manyRetained(t, s, 0) }},
		{name: "10000 retained messages with QoS 1", wrong: "max_queued_messages is 1000",
			run: func(t *testing.T, s *server) { manyRetained(t, s, 1) }},
	})
}

func manyRetained(t *testing.T, s *server, qos byte) {
	const count, window = 10_000, 20
	pub, ack := login(t, s, 5, hello{id: "pub"})
	require.GreaterOrEqual(t, ack.number(receiveMaximum, 65_535), window)
	for i := 0; i < count; i += window {
		for n := range window {
			pub.send(message{topic: fmt.Sprint("many/", i+n), payload: "m", qos: 1, id: uint16(n + 1), retain: true}.encode(5))
		}
		for range window {
			pub.want(typePuback)
		}
	}
	c, _ := login(t, s, 5, hello{id: "c"})
	c.join(qos, "many/#")
	seen := map[string]bool{}
	for range count {
		f := c.receive()
		assert.True(t, f.retain())
		seen[f.topic] = true
	}
	assert.Len(t, seen, count)
	c.quiet(pub)
}
