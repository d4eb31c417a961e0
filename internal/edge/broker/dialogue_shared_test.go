package broker_test

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDialogueSharedSubscriptions(t *testing.T) {
	hold(t, []dialogue{
		// 4.8.2: each shared subscription gets a copy, and so does an ordinary one.
		{name: "groups and an ordinary subscription each get a copy", run: func(t *testing.T, s *server) {
			for qos := range byte(3) {
				c, _ := login(t, s, 5, hello{id: "c"})
				c.subscribe(qos, [][]byte{property(subscriptionIdentifier, 1)}, "$share/one/t")
				c.subscribe(qos, [][]byte{property(subscriptionIdentifier, 2)}, "$share/two/t")
				c.subscribe(qos, [][]byte{property(subscriptionIdentifier, 3)}, "t")
				c.publish(message{topic: "t", payload: "m", qos: qos})
				var ids []any
				for range 3 {
					ids = append(ids, c.receive().props[subscriptionIdentifier]...)
				}
				assert.ElementsMatch(t, []any{1, 2, 3}, ids)
				c.quiet(c)
				c.leave()
			}
		}},
		// 4.8.2: one member gets each message.
		{name: "each message goes to one member", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			var members []*link
			for i := range 3 {
				m, _ := login(t, s, 5, hello{id: fmt.Sprint("m", i)})
				m.join(1, "$share/g/t", fmt.Sprint("end/", i))
				members = append(members, m)
			}
			const count = 30
			for i := range count {
				pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: 1})
			}
			seen := map[string]int{}
			for i, m := range members {
				pub.publish(message{topic: fmt.Sprint("end/", i), qos: 1})
				for f := m.receive(); f.topic == "t"; f = m.receive() {
					seen[f.payload]++
				}
			}
			assert.Len(t, seen, count)
			for payload, n := range seen {
				assert.Equal(t, 1, n, payload)
			}
		}},
		// 4.8.2: the server may choose; a member that is away loses QoS 0.
		{name: "absent member gets nothing while another is there", wrong: "gives it its share", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			away, _ := login(t, s, 5, keeping("away"))
			away.join(1, "$share/g/t")
			there, _ := login(t, s, 5, hello{id: "there"})
			there.join(1, "$share/g/t")
			away.leave()
			for qos := range byte(2) {
				for i := range 10 {
					pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: qos})
				}
				for i := range 10 {
					assert.Equal(t, fmt.Sprint(i), there.receive().payload)
				}
			}
			away, ack := login(t, s, 5, keeping("away"))
			require.True(t, ack.session)
			away.quiet(pub)
		}},
		// 4.8.2: "SHOULD" of messages with QoS 1 whose member's session has ended.
		{name: "QoS 1 of an ended session goes to another member", wrong: "loses them", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			for _, sent := range []bool{true, false} {
				first, _ := login(t, s, 5, keeping("first"))
				first.join(1, "$share/g/t")
				if !sent {
					first.leave()
				}
				for i := range 3 {
					pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: 1})
				}
				if sent {
					for range 3 {
						first.want(typePublish)
					}
				}
				second, _ := login(t, s, 5, hello{id: "second"})
				second.join(1, "$share/g/t")
				if sent {
					first.disconnect(0, property(sessionExpiry, 0))
				} else {
					first, _ = login(t, s, 5, hello{id: "first"})
					first.leave()
				}
				assert.ElementsMatch(t, []string{"0", "1", "2"}, second.payloads(3))
				second.leave()
			}
		}},
		// MQTT-4.8.2-4: a member that returns gets what was begun.
		{name: "QoS 2 is completed when the member returns", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			first, _ := login(t, s, 5, keeping("first"))
			first.join(2, "$share/g/t")
			pub.publish(message{topic: "t", payload: "m", qos: 2})
			id := first.want(typePublish).id
			second, _ := login(t, s, 5, hello{id: "second"})
			second.join(2, "$share/g/t")
			first.cut()
			first, _ = login(t, s, 5, keeping("first"))
			f := first.receive()
			assert.Equal(t, id, f.id)
			assert.Equal(t, "m", f.payload)
			second.quiet(pub)
		}},
		// MQTT-4.8.2-5: with QoS 2 it does not.
		{name: "QoS 2 of an ended session goes to nobody", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			first, _ := login(t, s, 5, keeping("first"))
			first.join(2, "$share/g/t")
			pub.publish(message{topic: "t", qos: 2})
			first.want(typePublish)
			second, _ := login(t, s, 5, hello{id: "second"})
			second.join(2, "$share/g/t")
			first.disconnect(0, property(sessionExpiry, 0))
			second.quiet(pub)
		}},
		// MQTT-4.8.2-6: an error in PUBACK discards the message.
		{name: "message that a member refuses goes to nobody", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			first, _ := login(t, s, 5, hello{id: "first"})
			first.join(1, "$share/g/t")
			pub.publish(message{topic: "t", qos: 1})
			f := first.want(typePublish)
			second, _ := login(t, s, 5, hello{id: "second"})
			second.join(1, "$share/g/t")
			first.send(packet(0x40, append(binary.BigEndian.AppendUint16(nil, f.id), 0x83)))
			first.quiet(pub)
			second.quiet(pub)
		}},
		// MQTT-4.8.2-3: the QoS is that of the member.
		{name: "QoS of the member", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.join(1, "$share/g/t")
			c.publish(message{topic: "t", qos: 2})
			assert.EqualValues(t, 1, c.receive().qos())
		}},
	})
}
