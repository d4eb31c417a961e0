package broker_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

func TestDialogueFlow(t *testing.T) {
	large := strings.Repeat("x", 200)
	hold(t, []dialogue{
		// MQTT-3.1.2-24, -25, MQTT-3.3.4-9: a message that is too large is dropped as if it had been sent.
		{name: "Maximum Packet Size takes no slot", wrong: "the slot stays taken", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			for _, qos := range []byte{1, 2} {
				sub, _ := login(t, s, 5, hello{id: "sub", props: [][]byte{property(maximumPacketSize, 100), property(receiveMaximum, 1)}})
				sub.join(qos, "t")
				for range 3 {
					pub.publish(message{topic: "t", payload: large, qos: qos})
				}
				pub.publish(message{topic: "t", payload: "small", qos: qos})
				assert.Equal(t, "small", sub.receive().payload)
				pub.publish(message{topic: "t", payload: large})
				sub.quiet(pub)
				sub.leave()
			}
		}},
		{name: "Maximum Packet Size of queued messages", wrong: "the slot stays taken", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			sub, _ := login(t, s, 5, keeping("sub"))
			sub.join(1, "t")
			sub.leave()
			for _, payload := range []string{large, "a", large, "b"} {
				pub.publish(message{topic: "t", payload: payload, qos: 1})
			}
			h := keeping("sub", property(maximumPacketSize, 100), property(receiveMaximum, 1))
			sub, _ = login(t, s, 5, h)
			assert.Equal(t, []string{"a", "b"}, sub.payloads(2))
			sub.quiet(pub)
			sub.leave()
			sub, ack := login(t, s, 5, h)
			require.True(t, ack.session)
			sub.quiet(pub)
		}},
		{name: "Maximum Packet Size of retained messages", wrong: "the slot stays taken", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t/1", payload: large, qos: 1, retain: true})
			pub.publish(message{topic: "t/2", payload: "small", qos: 1, retain: true})
			sub, _ := login(t, s, 5, hello{id: "sub", props: [][]byte{property(maximumPacketSize, 100), property(receiveMaximum, 1)}})
			sub.join(1, "t/#")
			assert.Equal(t, "small", sub.receive().payload)
			sub.quiet(pub)
		}},
		// MQTT-3.3.4-9, MQTT-4.9.0-2, -3: no more than Receive Maximum; other packets go on.
		{name: "Receive Maximum of the client", run: bothQoS(func(t *testing.T, s *server, qos byte) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			sub, _ := login(t, s, 5, hello{id: "sub", props: [][]byte{property(receiveMaximum, 2)}})
			sub.join(qos, "t")
			for i := range 5 {
				pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: qos})
			}
			a, b := sub.want(typePublish), sub.want(typePublish)
			assert.Equal(t, []string{"0", "1"}, []string{a.payload, b.payload})
			sub.ping()
			for _, f := range []frame{a, b} {
				if qos == 1 {
					sub.ack(typePuback, f.id)
					continue
				}
				sub.ack(typePubrec, f.id)
				assert.Equal(t, f.id, sub.await(typePubrel).id)
				sub.ack(typePubcomp, f.id)
			}
			assert.Equal(t, []string{"2", "3", "4"}, sub.payloads(3))
			sub.quiet(pub)
		})},
		// 3.3.4, MQTT-3.3.4-7, -8: more than the server's Receive Maximum is an error, 0x93.
		{name: "Receive Maximum of the server", wrong: "takes more", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			allowed := ack.number(receiveMaximum, 65_535)
			require.Less(t, allowed, 65_535, "or there are no more identifiers")
			go func() {
				for id := range allowed + 1 {
					c.send(message{topic: "t", qos: 2, id: uint16(id + 1)}.encode(5))
				}
			}()
			before := c.closed()
			last := before[len(before)-1]
			assert.Equal(t, typeDisconnect, last.kind)
			assert.EqualValues(t, 0x93, last.code)
		}},
	})
}

// bothQoS runs a dialogue of MQTT 5.0 for QoS 1 and 2.
func bothQoS(run func(t *testing.T, s *server, qos byte)) func(t *testing.T, s *server) {
	return func(t *testing.T, s *server) {
		for _, qos := range []byte{1, 2} {
			t.Run(fmt.Sprintf("QoS %d", qos), func(t *testing.T) { run(t, s, qos) })
		}
	}
}

func TestDialogueTopicAliases(t *testing.T) {
	alias := func(n int) [][]byte { return [][]byte{property(topicAlias, n)} }
	announced := func(t *testing.T, ack frame) int {
		t.Helper()
		n := ack.number(topicAliasMaximum, 0)
		require.Positive(t, n, "the broker takes aliases")
		return n
	}
	hold(t, []dialogue{
		// MQTT-3.3.2-12, 3.2.2.3.8: aliases up to the maximum that CONNACK announces.
		{name: "inbound", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			n := announced(t, ack)
			c.join(2, "#")
			for qos := range byte(3) {
				for _, a := range []int{1, n} {
					c.publish(message{topic: fmt.Sprint("topic/", a), qos: qos, props: alias(a)})
					c.publish(message{qos: qos, props: alias(a)})
					for range 2 {
						f := c.receive()
						assert.Equal(t, fmt.Sprint("topic/", a), f.topic)
						assert.NotContains(t, f.props, topicAlias)
					}
				}
			}
			c.publish(message{topic: "other", qos: 1, props: alias(1)})
			c.publish(message{qos: 1, props: alias(1)})
			assert.Equal(t, "other", c.receive().topic)
			assert.Equal(t, "other", c.receive().topic, "the alias was given to another topic")
		}},
		// MQTT-3.2.2-17, -18: without a maximum in CONNACK there are none.
		{name: "none without a maximum", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			c.send(message{topic: "t", qos: 1, id: 1, props: alias(1)}.encode(5))
			if ack.number(topicAliasMaximum, 0) == 0 {
				c.refused(0x94)
			} else {
				c.want(typePuback)
			}
		}},
		{name: "unknown", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.send(message{qos: 1, id: 1, props: alias(1)}.encode(5))
			c.refused(0x82, 0x94)
		}},
		// MQTT-3.3.2-9: 0x94; MQTT-3.3.2-8: 0 is none.
		{name: "above the maximum", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			n := ack.number(topicAliasMaximum, 0) + 1
			require.LessOrEqual(t, n, 65_535, "or there is no greater alias")
			c.send(message{topic: "t", qos: 1, id: 1, props: alias(n)}.encode(5))
			c.refused(0x94)
		}},
		{name: "0", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.send(message{topic: "t", qos: 1, id: 1, props: alias(0)}.encode(5))
			c.refused(0x81, 0x82, 0x94)
		}},
		// MQTT-3.3.2-7: aliases end with their connection.
		{name: "inbound alias ends with its connection", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, keeping("c"))
			announced(t, ack)
			c.publish(message{topic: "t", qos: 1, props: alias(1)})
			c.leave()
			c, ack = login(t, s, 5, keeping("c"))
			require.True(t, ack.session)
			c.send(message{qos: 1, id: 1, props: alias(1)}.encode(5))
			c.refused(0x82, 0x94)
		}},
		// 5.4.2, 3.3.2.3.4: rules are asked about the topic, not about the alias.
		{name: "inbound alias is checked",
			config: &broker.Config{Users: []broker.User{{Name: "alice", Realms: []string{"hers"}}, {Name: "root", Read: []string{"#"}}}},
			run: func(t *testing.T, s *server) {
				watch, _ := login(t, s, 5, hello{id: "watch", user: ptr("root")})
				watch.join(1, "#")
				c, ack := login(t, s, 5, hello{id: "c", user: ptr("alice")})
				announced(t, ack)
				assert.Less(t, c.publish(message{topic: "hers/x", payload: "first", qos: 1, props: alias(1)}).code, byte(0x80))
				assert.Less(t, c.publish(message{payload: "second", qos: 1, props: alias(1)}).code, byte(0x80))
				assert.Equal(t, []string{"first", "second"}, watch.payloads(2))
				c.send(message{topic: "theirs/x", payload: "third", qos: 1, id: 20, props: alias(1)}.encode(5))
				c.send(message{payload: "fourth", qos: 1, id: 21, props: alias(1)}.encode(5))
				for range 2 {
					if f := c.next(); f.kind == typeDisconnect {
						break
					} else {
						assert.GreaterOrEqual(t, f.code, byte(0x80))
					}
				}
				other, _ := login(t, s, 5, hello{id: "other", user: ptr("alice")})
				other.publish(message{topic: "hers/x", payload: "last", qos: 1})
				assert.Equal(t, "last", watch.receive().payload)
			}},
		// MQTT-3.1.2-26, -27, MQTT-3.3.2-7, -11: link.resolve checks maximum and definitions.
		{name: "outbound", restarts: true, run: func(t *testing.T, s *server) {
			topics := []string{"a", "b", "a", "c", "d", "a", "b"}
			for _, most := range []int{0, 2} {
				h := keeping(fmt.Sprint("sub", most), property(topicAliasMaximum, most))
				sub, _ := login(t, s, 5, h)
				sub.join(1, "+")
				exchange := func() {
					pub, _ := login(t, s, 5, hello{id: "pub"})
					for _, topic := range topics {
						pub.publish(message{topic: topic, qos: 1})
					}
					for _, topic := range topics {
						assert.Equal(t, topic, sub.receive().topic)
					}
				}
				exchange()
				for range 2 { // the second time without an answer
					sub.leave()
					sub, _ = login(t, s, 5, h)
					exchange()
					pub, _ := login(t, s, 5, hello{id: "pub"})
					pub.publish(message{topic: "a", qos: 1})
					assert.Equal(t, "a", sub.want(typePublish).topic)
					sub.leave()
					sub, _ = login(t, s, 5, h)
					assert.Equal(t, "a", sub.receive().topic)
				}
				pub, _ := login(t, s, 5, hello{id: "pub"})
				pub.publish(message{topic: "b", qos: 1})
				assert.Equal(t, "b", sub.want(typePublish).topic)
				sub.leave()
				s.stop(t)
				s.start(t)
				sub, _ = login(t, s, 5, h)
				assert.Equal(t, "b", sub.receive().topic)
				exchange()
				sub.leave()
			}
		}},
	})
}
