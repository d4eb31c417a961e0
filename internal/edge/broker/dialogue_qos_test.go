package broker_test

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDialogueAcknowledgements(t *testing.T) {
	own := [][]byte{property(userProperty, [2]string{"key", "value"})}
	hold(t, []dialogue{
		// 3.4.2.2, 3.5.2.2, 3.7.2.2: properties of an acknowledgement are the receiver's; MQTT-3.4.2-1, MQTT-3.5.2-1: codes.
		{name: "publisher's properties are not echoed", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			for _, qos := range []byte{1, 2} {
				ack := c.publish(message{topic: "t", qos: qos, props: own})
				assert.NotContains(t, ack.props, userProperty)
				assert.Contains(t, []byte{0, 0x10}, ack.code)
			}
			c.send(message{topic: "t", qos: 2, id: 9}.encode(5))
			c.want(typePubrec)
			c.send(packet(0x62, slices.Concat([]byte{0, 9, 0}, properties(own...))))
			done := c.want(typePubcomp)
			assert.Zero(t, done.code)
			assert.NotContains(t, done.props, userProperty)
			c.send(packet(0x82, slices.Concat([]byte{0, 10}, properties(own...), str("t"), []byte{0})))
			assert.NotContains(t, c.want(typeSuback).props, userProperty)
			c.send(packet(0xa2, slices.Concat([]byte{0, 11}, properties(own...), str("t"))))
			gone := c.want(typeUnsuback)
			assert.NotContains(t, gone.props, userProperty)
			assert.Equal(t, []byte{0}, gone.codes)
		}},
		// MQTT-3.1.2-29: Reason String and User Property only in PUBLISH, CONNACK and DISCONNECT.
		{name: "Request Problem Information 0", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c", props: [][]byte{property(requestProblem, 0)}})
			answers := []frame{c.publish(message{topic: "nobody", qos: 1}), c.publish(message{topic: "nobody", qos: 2}),
				c.publish(message{topic: "$SYS/x", qos: 1})}
			c.ack(typePubrel, 999)
			answers = append(answers, c.want(typePubcomp))
			c.send(packet(0xa2, slices.Concat([]byte{0, 90, 0}, str("unknown"))))
			answers = append(answers, c.want(typeUnsuback))
			for _, a := range answers {
				assert.NotContains(t, a.props, reasonString)
				assert.NotContains(t, a.props, userProperty)
			}
		}},
		// 3.6.2.1, 3.7.2.1: Packet Identifier not found; MQTT-4.3.3-11: PUBREL is always answered.
		{name: "PUBREL of an unknown identifier", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.ack(typePubrel, 77)
			done := c.want(typePubcomp)
			assert.EqualValues(t, 77, done.id)
			if level == 5 {
				assert.Contains(t, []byte{0, 0x92}, done.code)
			}
			c.ping()
		})},
		// MQTT-3.3.4-1, 4.3.2, 4.3.3: a topic of the server's own is no exception.
		{name: "PUBLISH to $SYS is acknowledged", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			for range 30 {
				c.publish(message{topic: "$SYS/broker/x", qos: 1})
				c.publish(message{topic: "$SYS/broker/x", qos: 2})
			}
			c.ping()
		})},
		// MQTT-3.3.1-3: DUP of the publisher is not passed on. MQTT-3.8.4-8: QoS is the lower of both.
		{name: "DUP and QoS of the publisher", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			for granted := range byte(3) {
				topic := fmt.Sprint("t/", granted)
				c.join(granted, topic)
				for qos := range byte(3) {
					c.publish(message{topic: topic, qos: qos, dup: qos > 0})
					f := c.receive()
					assert.Equal(t, min(qos, granted), f.qos())
					assert.False(t, f.dup())
				}
			}
		})},
		// MQTT-3.11.3-2, 3.11.2-1: UNSUBACK has a code for each filter, in order; 3.1.1 has none.
		{name: "UNSUBACK", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.join(1, "a", "b/+")
			empty := properties()
			if level == 4 {
				empty = nil
			}
			c.send(packet(0xa2, slices.Concat([]byte{0, 50}, empty, str("a"), str("x"), str("b/+"))))
			ack := c.want(typeUnsuback)
			assert.EqualValues(t, 50, ack.id)
			if level == 5 {
				assert.Equal(t, []byte{0, 0x11, 0}, ack.codes)
			} else {
				assert.Empty(t, ack.codes)
			}
			c.publish(message{topic: "a", qos: 1})
			c.publish(message{topic: "b/1", qos: 1})
			c.quiet(c)
		})},
	})
}

func TestDialogueQoS2(t *testing.T) {
	hold(t, []dialogue{
		// MQTT-4.3.3-10, -12: until PUBREL the identifier is taken, whatever DUP says.
		{name: "same identifier before PUBREL is a duplicate", wrong: "ends the connection with 0x82",
			run: levels(func(t *testing.T, s *server, level byte) {
				sub, _ := login(t, s, level, hello{id: "sub"})
				sub.join(2, "t")
				c, _ := login(t, s, level, hello{id: "c"})
				for _, dup := range []bool{false, false, true} {
					c.send(message{topic: "t", payload: "once", qos: 2, id: 5, dup: dup}.encode(level))
					ack := c.want(typePubrec)
					assert.EqualValues(t, 5, ack.id)
					assert.Less(t, ack.code, byte(0x80))
				}
				c.ack(typePubrel, 5)
				c.want(typePubcomp)
				assert.Equal(t, "once", sub.receive().payload)
				c.publish(message{topic: "t", payload: "again", qos: 2, id: 5})
				assert.Equal(t, "again", sub.receive().payload, "after PUBCOMP the identifier is free")
				sub.quiet(c)
			})},
		// MQTT-4.3.3-10, 4.1: the identifiers that were received are part of the session.
		{name: "duplicate over a new connection", run: func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, hello{id: "sub"})
			sub.join(2, "t")
			c, _ := login(t, s, 5, keeping("c"))
			c.send(message{topic: "t", payload: "once", qos: 2, id: 5}.encode(5))
			c.want(typePubrec)
			c.cut()
			c, ack := login(t, s, 5, keeping("c"))
			require.True(t, ack.session)
			c.send(message{topic: "t", payload: "once", qos: 2, id: 5, dup: true}.encode(5))
			c.want(typePubrec)
			c.ack(typePubrel, 5)
			c.want(typePubcomp)
			assert.Equal(t, "once", sub.receive().payload)
			sub.quiet(c)
		}},
		// MQTT-4.3.3-4: PUBREL only after a PUBREC below 0x80; 3.5.2.1, 4.9: the slot of Receive Maximum is free.
		{name: "PUBREC with an error ends the message", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			h := keeping("sub", property(receiveMaximum, 1))
			sub, _ := login(t, s, 5, h)
			sub.join(2, "t")
			pub.publish(message{topic: "t", payload: "first", qos: 2})
			pub.publish(message{topic: "t", payload: "second", qos: 2})
			f := sub.want(typePublish)
			assert.Equal(t, "first", f.payload)
			sub.send(packet(0x50, append(binary.BigEndian.AppendUint16(nil, f.id), 0x97)))
			assert.Equal(t, "second", sub.receive().payload, "no PUBREL comes before")
			sub.quiet(pub)
			sub.cut()
			sub, ack := login(t, s, 5, h)
			require.True(t, ack.session)
			sub.quiet(pub)
		}},
		// MQTT-4.3.2-3, 3.4.2.1: PUBACK with an error is an acknowledgement.
		{name: "PUBACK with an error ends the message", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			sub, _ := login(t, s, 5, keeping("sub", property(receiveMaximum, 1)))
			sub.join(1, "t")
			pub.publish(message{topic: "t", payload: "first", qos: 1})
			pub.publish(message{topic: "t", payload: "second", qos: 1})
			f := sub.want(typePublish)
			sub.send(packet(0x40, append(binary.BigEndian.AppendUint16(nil, f.id), 0x80)))
			assert.Equal(t, "second", sub.receive().payload)
			sub.quiet(pub)
		}},
		// MQTT-4.4.0-1: after a new connection PUBLISH with DUP, after PUBREC a PUBREL, with the same identifiers.
		{name: "outbound message continues on a new connection", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			sub, _ := login(t, s, level, keeping("sub"))
			sub.join(2, "t")
			pub.publish(message{topic: "t", payload: "m", qos: 2})
			first := sub.want(typePublish)
			assert.False(t, first.dup())
			sub.cut()
			sub, _ = login(t, s, level, keeping("sub"))
			second := sub.want(typePublish)
			assert.True(t, second.dup())
			assert.Equal(t, first.id, second.id)
			sub.ack(typePubrec, second.id)
			assert.Equal(t, first.id, sub.want(typePubrel).id)
			sub.cut()
			sub, _ = login(t, s, level, keeping("sub"))
			assert.Equal(t, first.id, sub.want(typePubrel).id)
			sub.ack(typePubcomp, first.id)
			sub.quiet(pub)
		})},
		// MQTT-4.3.2-5: after PUBACK the identifier is free, whatever DUP says.
		{name: "same identifier after PUBACK is a new message", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.join(1, "t")
			for i, dup := range []bool{false, true, false} {
				c.publish(message{topic: "t", payload: fmt.Sprint(i), qos: 1, id: 50, dup: dup})
				assert.Equal(t, fmt.Sprint(i), c.receive().payload)
			}
		})},
		// MQTT-2.2.1-4, MQTT-4.3.2-1, MQTT-4.3.3-1: identifiers of the server are not 0, and each is unused.
		{name: "identifiers of the server are unused", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			sub, _ := login(t, s, level, hello{id: "sub", props: [][]byte{property(receiveMaximum, 20)}})
			sub.join(2, "t")
			open := map[uint16]bool{0: true}
			for i := range 20 {
				pub.publish(message{topic: "t", qos: byte(1 + i%2)})
				f := sub.want(typePublish)
				assert.False(t, open[f.id], "identifier %d", f.id)
				open[f.id] = true
			}
		})},
		// MQTT-3.10.4-3: a delivery that was begun goes on after UNSUBSCRIBE.
		{name: "delivery is completed after UNSUBSCRIBE", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.join(2, "t")
			c.publish(message{topic: "t", qos: 2})
			f := c.want(typePublish)
			body := []byte{0, 90}
			if level == 5 {
				body = append(body, 0)
			}
			c.send(packet(0xa2, append(body, str("t")...)))
			c.want(typeUnsuback)
			c.ack(typePubrec, f.id)
			rel := c.want(typePubrel)
			assert.Equal(t, f.id, rel.id)
			assert.Zero(t, rel.code)
			c.ack(typePubcomp, f.id)
			c.quiet(c)
		})},
		// MQTT-3.3.4-2, MQTT-3.9.3-1: overlapping subscriptions, each with its own QoS.
		{name: "greatest QoS of overlapping subscriptions", wrong: "sends 3.1.1 the QoS of one of them",
			run: levels(func(t *testing.T, s *server, level byte) {
				c, _ := login(t, s, level, hello{id: "c"})
				body := []byte{0, 90}
				if level == 5 {
					body = append(body, 0)
				}
				for i, filter := range []string{"t/+", "t/#", "+/1"} {
					body = append(append(body, str(filter)...), []byte{0, 2, 1}[i])
				}
				c.send(packet(0x82, body))
				assert.Equal(t, []byte{0, 2, 1}, c.want(typeSuback).codes, "in the order of the filters")
				c.publish(message{topic: "t/1", payload: "m", qos: 2})
				c.join(2, "end")
				c.publish(message{topic: "end", qos: 2})
				var granted []byte
				for f := c.receive(); f.topic != "end"; f = c.receive() {
					granted = append(granted, f.qos())
				}
				assert.Contains(t, granted, byte(2))
				assert.LessOrEqual(t, len(granted), 3)
			})},
		// MQTT-3.3.1-1, -2: DUP says that the same packet was sent before, queueing does not count.
		{name: "DUP on the second delivery only", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			sub, _ := login(t, s, level, keeping("sub"))
			sub.join(1, "t")
			sub.leave()
			pub.publish(message{topic: "t", payload: "m", qos: 1})
			sub, _ = login(t, s, level, keeping("sub"))
			first := sub.want(typePublish)
			assert.False(t, first.dup(), "it was queued, but not sent")
			sub.cut()
			sub, _ = login(t, s, level, keeping("sub"))
			second := sub.want(typePublish)
			assert.True(t, second.dup())
			assert.Equal(t, first.id, second.id)
			assert.Equal(t, "m", second.payload)
			sub.ack(typePuback, second.id)
			sub.quiet(pub)
			sub.leave()
		})},
	})
}
