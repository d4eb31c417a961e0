package broker_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestDialogueOrder has dialogues about order, replacement and the size of answers.
func TestDialogueOrder(t *testing.T) {
	hold(t, []dialogue{
		// MQTT-4.6.0-5, -6 of 5.0 and 3.1.1: messages of one client, topic and QoS arrive in their order.
		{name: "messages keep their order", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			sub, _ := login(t, s, level, hello{id: "sub"})
			sub.join(2, "t/+")
			const count = 100
			for i := range count {
				for qos := range byte(3) {
					pub.publish(message{topic: fmt.Sprint("t/", qos), payload: fmt.Sprint(i), qos: qos})
				}
			}
			next := map[string]int{}
			for range 3 * count {
				f := sub.receive()
				assert.Equal(t, fmt.Sprint(next[f.topic]), f.payload, f.topic)
				next[f.topic]++
			}
		})},
		// MQTT-3.3.1-7 of 3.1.1, MQTT-3.3.1-5 of 5.0: a retained message with QoS 0 replaces the topic's previous one.
		{name: "retained message with QoS 0 replaces one with QoS 1", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			pub.publish(message{topic: "t", payload: "old", qos: 1, retain: true})
			pub.publish(message{topic: "t", payload: "new", retain: true})
			pub.ping()
			sub, _ := login(t, s, level, hello{id: "sub"})
			sub.join(1, "t")
			assert.Equal(t, "new", sub.receive().payload)
			sub.quiet(pub)
		})},
		// MQTT-3.8.4-4 of 5.0: subscribing again loses nothing that is published meanwhile.
		{name: "subscribing again loses nothing", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			sub, _ := login(t, s, level, hello{id: "sub"})
			sub.join(1, "t")
			const count = 200
			published := make(chan struct{})
			go func() {
				defer close(published)
				for i := range count {
					pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: 1})
				}
			}()
			for range 50 {
				sub.subscribe(1, nil, "t")
			}
			<-published
			for i := range count {
				require.Equal(t, fmt.Sprint(i), sub.receive().payload)
			}
		})},
		// MQTT-4.9.0-3 of 5.0: PUBREL does not wait for room in Receive Maximum.
		{name: "PUBREL on a new connection does not wait", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			sub, _ := login(t, s, 5, keeping("sub", property(receiveMaximum, 2)))
			sub.join(2, "t")
			pub.publish(message{topic: "t", payload: "first", qos: 2})
			pub.publish(message{topic: "t", payload: "second", qos: 2})
			first, second := sub.want(typePublish), sub.want(typePublish)
			sub.ack(typePubrec, second.id)
			assert.Equal(t, second.id, sub.want(typePubrel).id)
			sub.cut()
			sub, _ = login(t, s, 5, keeping("sub", property(receiveMaximum, 1)))
			ids := map[byte]uint16{}
			for range 2 {
				f := sub.next()
				ids[f.kind] = f.id
			}
			assert.Equal(t, map[byte]uint16{typePublish: first.id, typePubrel: second.id}, ids)
		}},
		// MQTT-3.1.2-24 and, of the properties of each packet, 3.2.2-19 and its siblings: no answer exceeds Maximum Packet Size.
		{name: "answers keep to Maximum Packet Size", wrong: "a SUBACK that is too large is sent", run: func(t *testing.T, s *server) {
			dialLink(t, s, 5).tooSmall(hello{id: "tiny", props: [][]byte{property(maximumPacketSize, 6)}})
			c, _ := login(t, s, 5, hello{id: "small", props: [][]byte{property(maximumPacketSize, 30)}})
			c.join(0, strings.Split(strings.Repeat("t,", 20)+"t", ",")...)
			c.subscribeTooMuch(40)
		}},
	})
}

// tooSmall connects with a Maximum Packet Size that is smaller than CONNACK, and expects that the broker closes.
func (l *link) tooSmall(h hello) {
	l.t.Helper()
	l.send(h.encode(l.level))
	assert.Empty(l.t, l.closed())
}

// subscribeTooMuch expects 0x95, packet too large, because SUBACK would not fit.
func (l *link) subscribeTooMuch(filters int) {
	l.t.Helper()
	body := []byte{0, 77, 0}
	for range filters {
		body = append(append(body, str("t")...), 0)
	}
	l.send(packet(0x82, body))
	l.refused(0x95)
}
