package broker_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// session connects a raw client of MQTT 3.1.1 with a persistent session, and reports whether the broker has kept it.
func session(t testing.TB, s *server, id string) (*raw, bool) {
	t.Helper()
	r := dialRaw(t, s.address)
	r.send(connectPacket(4, 0, id))
	answer := r.read(t)
	require.Equal(t, []byte{0x20, 2, answer[2], 0}, answer)
	return r, answer[2] == 1
}

// killed kills the broker, starts it again and resumes a session.
func killed(t testing.TB, s *server, id string) *raw {
	t.Helper()
	s.stop(t)
	s.start(t)
	r, kept := session(t, s, id)
	require.True(t, kept)
	return r
}

// ack is PUBACK (4), PUBREC (5), PUBREL (6) or PUBCOMP (7).
func ack(kind, id byte) []byte {
	first := kind << 4
	if kind == 6 {
		first |= 2
	}
	return []byte{first, 2, 0, id}
}

// publish2 is a PUBLISH with QoS 2 to the topic t.
func publish2(dup bool, id byte, payload string) []byte {
	first := byte(0x34)
	if dup {
		first |= 8
	}
	return packet(first, append(append(str("t"), 0, id), payload...))
}

func subscribe(t testing.TB, r *raw, id byte, filter string, qos byte) {
	t.Helper()
	r.send(packet(0x82, append([]byte{0, id}, append(str(filter), qos)...)))
	require.Equal(t, []byte{0x90, 3, 0, id, qos}, r.read(t))
}

// TestKilledWhileReceiving kills the broker at each step of a message with QoS 2 from a client. The client continues as
// the protocol asks for, and each message is passed on once.
func TestKilledWhileReceiving(t *testing.T) {
	for _, step := range []string{"PUBREC", "PUBCOMP", "next PUBREC"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			s := process(t)
			away, _ := session(t, s, "away")
			subscribe(t, away, 1, "t", 2)
			away.conn.Close()
			pub, _ := session(t, s, "pub")
			restart := func() { pub = killed(t, s, "pub") }
			exchange := func(out, in []byte) {
				pub.send(out)
				require.Equal(t, in, pub.read(t))
			}
			exchange(publish2(false, 1, "one"), ack(5, 1))
			if step == "PUBREC" {
				restart()
				exchange(publish2(true, 1, "one"), ack(5, 1)) // as if PUBREC were lost
			}
			exchange(ack(6, 1), ack(7, 1))
			if step == "PUBCOMP" {
				restart()
			}
			exchange(publish2(step == "PUBCOMP", 1, "two"), ack(5, 1)) // the identifier is free
			if step == "next PUBREC" {
				restart()
				exchange(publish2(true, 1, "two"), ack(5, 1))
			}
			exchange(ack(6, 1), ack(7, 1))
			exchange(ack(6, 1), ack(7, 1)) // as if PUBCOMP were lost

			_, in := connect(t, s, mqtt.Config{Protocol: 4, ClientID: "away", SessionExpiry: time.Hour})
			end, _ := connect(t, s, mqtt.Config{Protocol: 4})
			require.NoError(t, end.Publish(patient(t), "t", 2, false, []byte("end")))
			assert.Equal(t, []string{"t q2 one", "t q2 two", "t q2 end"}, in.wait(t, "end"))
		})
	}
}

// TestKilledWhileSending kills the broker at each step of a message with QoS 2 to a connected client.
func TestKilledWhileSending(t *testing.T) {
	s := process(t)
	sub, _ := session(t, s, "sub")
	subscribe(t, sub, 1, "t", 2)
	pub, _ := connect(t, s, mqtt.Config{Protocol: 4, ClientID: "pub", SessionExpiry: time.Hour})
	require.NoError(t, pub.Publish(patient(t), "t", 2, false, []byte("one")))
	m := sub.read(t)
	id := m[6]
	assert.Equal(t, publish2(false, id, "one"), m)
	sub = killed(t, s, "sub")
	assert.Equal(t, publish2(true, id, "one"), sub.read(t), "the broker knows what it has sent")
	sub.send(ack(5, id))
	assert.Equal(t, ack(6, id), sub.read(t))
	sub = killed(t, s, "sub")
	assert.Equal(t, ack(6, id), sub.read(t), "the client has forgotten the message and would take it for a new one")
	sub.send(ack(7, id))
	require.NoError(t, pub.Publish(patient(t), "t", 2, false, []byte("two")))
	m = sub.read(t)
	assert.Equal(t, publish2(false, m[6], "two"), m)
}

// TestSamePacketIdentifiers: what a client sends has no effect on what the broker sends it with the same packet
// identifiers.
func TestSamePacketIdentifiers(t *testing.T) {
	s := embedded(t, broker.Config{})
	c, _ := session(t, s, "c")
	subscribe(t, c, 1, "t", 2)
	pub, _ := connect(t, s, mqtt.Config{})
	var ids []byte
	for i := range 3 {
		require.NoError(t, pub.Publish(patient(t), "t", 2, false, fmt.Append(nil, i)))
		m := c.read(t)
		ids = append(ids, m[6])
	}
	c.send(packet(0x32, append(str("x"), 0, ids[0])))
	assert.Equal(t, ack(4, ids[0]), c.read(t))
	c.send(packet(0x34, append(str("x"), 0, ids[1])))
	assert.Equal(t, ack(5, ids[1]), c.read(t))
	c.send(ack(6, ids[2])) // of no message
	assert.Equal(t, ack(7, ids[2]), c.read(t))
	subscribe(t, c, ids[0], "y", 1)
	c.send(packet(0xa2, append([]byte{0, ids[0]}, str("y")...)))
	assert.Equal(t, []byte{0xb0, 2, 0, ids[0]}, c.read(t))
	c.conn.Close()

	c, _ = session(t, s, "c")
	for i, id := range ids {
		assert.Equal(t, publish2(true, id, fmt.Sprint(i)), c.read(t))
	}
	c.send(packet(0x3c, append(str("x"), 0, ids[1])))
	assert.Equal(t, ack(5, ids[1]), c.read(t), "the same message with the DUP flag")
	c.send(ack(6, ids[1]))
	assert.Equal(t, ack(7, ids[1]), c.read(t))
}

// TestDuplicate5: MQTT 5.0 acknowledges a duplicate without an error, and the receive maximum has room again.
func TestDuplicate5(t *testing.T) {
	s := embedded(t, broker.Config{})
	sub, in := connect(t, s, mqtt.Config{})
	require.NoError(t, sub.Subscribe(patient(t), "t", 2, mqtt.SubscribeOptions{}))
	r := dialRaw(t, s.address)
	r.send(connectPacket(5, 2, "pub"))
	r.read(t)
	for range 2000 { // more than the receive maximum
		for _, first := range []byte{0x34, 0x3c} {
			r.send(packet(first, append(str("t"), 0, 1, 0, 'x')))
			require.Equal(t, ack(5, 1), r.read(t))
		}
		for range 2 {
			r.send(ack(6, 1))
			answer := r.read(t)
			require.Equal(t, ack(7, 1)[2:4], answer[2:4])
		}
	}
	r.send(packet(0x34, append(str("t"), 0, 1, 0, 'e', 'n', 'd')))
	assert.Len(t, in.wait(t, "end"), 2001)
}
