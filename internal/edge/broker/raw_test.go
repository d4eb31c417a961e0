package broker_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// raw is a client that sends and reads raw bytes.
type raw struct {
	conn net.Conn
}

func dialRaw(t testing.TB, address string) *raw {
	c, err := net.Dial("tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	return &raw{c}
}

func (r *raw) send(b []byte) { r.conn.Write(b) }

// read reads one packet of less than 128 bytes.
func (r *raw) read(t testing.TB) []byte {
	t.Helper()
	head := make([]byte, 2)
	_, err := io.ReadFull(r.conn, head)
	require.NoError(t, err)
	body := make([]byte, head[1])
	_, err = io.ReadFull(r.conn, body)
	require.NoError(t, err)
	return append(head, body...)
}

// packet puts the fixed header before a body.
func packet(first byte, body []byte) []byte {
	var length [binary.MaxVarintLen32]byte // MQTT encodes lengths as varints
	n := binary.PutUvarint(length[:], uint64(len(body)))
	return append(append([]byte{first}, length[:n]...), body...)
}

func str(s string) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(s))), s...) }

// connectPacket makes a CONNECT; fields follow the client identifier.
func connectPacket(level, flags byte, client string, fields ...string) []byte {
	var b bytes.Buffer
	b.Write(str("MQTT"))
	b.Write([]byte{level, flags, 0, 60})
	if level == 5 {
		b.WriteByte(0)
	}
	b.Write(str(client))
	if level == 5 && flags&4 != 0 {
		b.WriteByte(0)
	}
	for _, f := range fields {
		b.Write(str(f))
	}
	return packet(0x10, b.Bytes())
}

// TestPublicPeer sends the same bytes as the public peers: protocol level 0x84, a user name, and the password flag with
// an empty password.
func TestPublicPeer(t *testing.T) {
	for name, start := range map[string]func(t testing.TB) *server{
		"embedded": func(t testing.TB) *server { return embedded(t, broker.Config{}) },
		"users": func(t testing.TB) *server {
			return embedded(t, broker.Config{Users: []broker.User{{Name: "cli", Realms: []string{"realm", "app"}}}})
		},
		"mosquitto": mosquittoServer,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t)
			r := dialRaw(t, s.address)
			hello := connectPacket(0x84, 0x02|0x80|0x40, "peer", "cli", "")
			assert.Equal(t, "1017"+"00044d515454"+"84"+"c2"+"003c"+"000470656572"+"0003636c69"+"0000", fmt.Sprintf("%x", hello))
			r.send(hello)
			assert.Equal(t, []byte{0x20, 2, 0, 0}, r.read(t), "accepted")
			r.send(packet(0x82, append([]byte{0, 1}, append(str("app/#"), 1)...)))
			assert.Equal(t, []byte{0x90, 3, 0, 1, 1}, r.read(t), "QoS 1 granted")
			r.send(packet(0x32, append(str("app/x"), 0, 2, 'm')))
			assert.Equal(t, []byte{0x40, 2, 0, 2}, r.read(t), "acknowledged, and not sent back")
			other, _ := connect(t, s, mqtt.Config{Username: "cli"})
			require.NoError(t, other.Publish(patient(t), "app/y", 0, false, []byte("theirs")))
			assert.Equal(t, packet(0x30, append(str("app/y"), "theirs"...)), r.read(t), "nothing of its own came before")
			r.send([]byte{0xc0, 0})
			assert.Equal(t, []byte{0xd0, 0}, r.read(t))
		})
	}
}

// TestPublicPeerSession: the session keeps the bridge bit, also across a restart of the broker.
func TestPublicPeerSession(t *testing.T) {
	s := embedded(t, broker.Config{})
	r := dialRaw(t, s.address)
	r.send(connectPacket(0x84, 0, "peer"))
	assert.Equal(t, []byte{0x20, 2, 0, 0}, r.read(t))
	r.send(packet(0x82, append([]byte{0, 1}, append(str("app/#"), 1)...)))
	r.read(t)
	r.conn.Close()
	s.stop(t)
	s.start(t)
	r = dialRaw(t, s.address)
	r.send(connectPacket(0x84, 0, "peer"))
	assert.Equal(t, []byte{0x20, 2, 1, 0}, r.read(t), "the session is there")
	r.send(packet(0x32, append(str("app/x"), 0, 2, 'm')))
	assert.Equal(t, []byte{0x40, 2, 0, 2}, r.read(t))
	r.send([]byte{0xc0, 0})
	assert.Equal(t, []byte{0xd0, 0}, r.read(t), "its own message did not come back")
}

// TestTakeOverStays: when a session is taken over, the end of the old connection does not end the session.
func TestTakeOverStays(t *testing.T) {
	s := embedded(t, broker.Config{})
	pub, _ := connect(t, s, mqtt.Config{})
	for i := range 20 {
		r := dialRaw(t, s.address)
		r.send(connectPacket(4, 2, "twin"))
		require.Equal(t, []byte{0x20, 2, 0, 0}, r.read(t))
		require.Eventually(t, func() bool { return s.stats().Clients == 2 }, patience, time.Millisecond, "the previous connection has ended")
		require.Equal(t, 2, s.stats().Sessions, "take-over %d", i)
		r.send(packet(0x82, append([]byte{0, 1}, append(str("t"), 1)...)))
		require.Equal(t, []byte{0x90, 3, 0, 1, 1}, r.read(t))
		for range 500 { // they make the end of a session take a while
			require.NoError(t, pub.Publish(patient(t), "t", 1, false, []byte("x")))
		}
		require.Eventually(t, func() bool { return s.stats().Inflight == 500 }, patience, time.Millisecond)
	}
}

// TestJunk sends bytes that are not MQTT, and too many of them. The broker keeps serving other clients.
func TestJunk(t *testing.T) {
	s := embedded(t, broker.Config{MaxPacket: 4096})
	c, in := connect(t, s, mqtt.Config{})
	require.NoError(t, c.Subscribe(patient(t), "ok", 1, mqtt.SubscribeOptions{}))
	hello := connectPacket(4, 2, "junk")
	for name, bytes := range map[string][]byte{
		"no connect":        {0x30, 3, 0, 1, 'a'},
		"http":              []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"endless length":    {0x10, 0xff, 0xff, 0xff, 0xff, 0xff},
		"level 9":           connectPacket(9, 2, "junk"),
		"reserved bit":      connectPacket(4, 3, "junk"),
		"truncated connect": packet(0x10, append(str("MQTT"), 4)),
		"connect twice":     append(append([]byte{}, hello...), hello...),
		"too large":         append(append([]byte{}, hello...), 0x30, 0x80, 0x80, 0x80, 1),
		"empty subscribe":   append(append([]byte{}, hello...), packet(0x82, []byte{0, 1})...),
		"short subscribe":   append(append([]byte{}, hello...), packet(0x82, []byte{0, 1, 0, 9, 'a'})...),
		"wildcard publish":  append(append([]byte{}, hello...), packet(0x30, append(str("a/#"), 'x'))...),
		"subscribe, no qos": append(append([]byte{}, connectPacket(5, 2, "junk")...), packet(0x82, append([]byte{0, 1, 0}, str("a")...))...),
	} {
		r := dialRaw(t, s.address)
		r.send(bytes)
		_, err := io.Copy(io.Discard, r.conn)
		assert.NoError(t, err, "%s: the connection is closed", name)
	}
	require.Eventually(t, func() bool { return s.stats().Sessions == 1 && s.stats().Clients == 1 }, patience, time.Millisecond,
		"nothing is left of them")
	require.NoError(t, c.Publish(patient(t), "ok", 1, false, []byte("alive")))
	in.wait(t, "alive")
}

// TestAcknowledgementsAreTheirOwn checks that acknowledgements of MQTT 5.0 have neither the properties of what they
// acknowledge nor a reason code that they do not define: MQTT.js closes a connection for PUBACK with 0x01.
func TestAcknowledgementsAreTheirOwn(t *testing.T) {
	s := embedded(t, broker.Config{})
	r := dialRaw(t, s.address)
	r.send(connectPacket(5, 2, "acks"))
	r.read(t)
	user := append(append([]byte{0x26}, str("key")...), str("value")...)
	properties := append([]byte{byte(len(user))}, user...)
	publish := func(first byte) []byte {
		return packet(first, slices.Concat(str("topic"), []byte{0, 7}, properties, []byte("payload")))
	}
	for _, step := range []struct {
		name         string
		send, answer []byte
	}{
		{"PUBLISH with QoS 1", publish(0x32), []byte{0x40, 2, 0, 7}},
		{"PUBLISH with QoS 2", publish(0x34), []byte{0x50, 2, 0, 7}},
		{"PUBREL", packet(0x62, slices.Concat([]byte{0, 7, 0}, properties)), []byte{0x70, 2, 0, 7}},
		{"SUBSCRIBE", packet(0x82, slices.Concat([]byte{0, 8}, properties, str("other"), []byte{1})), []byte{0x90, 4, 0, 8, 0, 1}},
		{"UNSUBSCRIBE", packet(0xa2, slices.Concat([]byte{0, 9}, properties, str("other"))), []byte{0xb0, 4, 0, 9, 0, 0}},
	} {
		r.send(step.send)
		assert.Equal(t, step.answer, r.read(t), step.name)
	}
}
