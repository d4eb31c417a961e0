package broker_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// TestNamesThatCannotBeStored: what is too long for a key of the store, or has too many levels for the tree, is refused
// and does not keep the rest from the disk.
func TestNamesThatCannotBeStored(t *testing.T) {
	t.Parallel()
	s := embedded(t, broker.Config{})
	for _, name := range []string{strings.Repeat("x", 60_000), strings.Repeat("/", 20_000)} {
		r := dialRaw(t, s.address)
		r.send(connectPacket(4, 2, name))
		assert.Equal(t, []byte{0x20, 2, 0, 2}, r.read(t), "CONNECT is refused")
		r = dialRaw(t, s.address)
		r.send(connectPacket(4, 2|4|0x20, "will", name, "dead"))
		assert.Equal(t, []byte{0x20, 2, 0, 3}, r.read(t), "CONNECT with a retained will is refused")
		r = dialRaw(t, s.address)
		r.send(connectPacket(4, 0, "long"))
		r.read(t)
		r.send(packet(0x82, slices.Concat([]byte{0, 1}, str(name), []byte{1})))
		assert.Equal(t, []byte{0x90, 3, 0, 1, 0x80}, r.read(t), "SUBSCRIBE is refused")
		r.send(packet(0x33, slices.Concat(str(name), []byte{0, 2}, []byte("kept"))))
		assert.Equal(t, []byte{0x40, 2, 0, 2}, r.read(t))
		r.send(packet(0x32, slices.Concat(str(name), []byte{0, 3}, []byte("passed on"))))
		assert.Equal(t, []byte{0x40, 2, 0, 3}, r.read(t))
		r.send(packet(0x33, slices.Concat(str("short"), []byte{0, 4}, []byte("kept"))))
		assert.Equal(t, []byte{0x40, 2, 0, 4}, r.read(t))
		r.conn.Close()
	}
	require.Zero(t, s.stats().StoreErrors)
	require.Equal(t, 1, s.stats().Retained)
	require.Zero(t, s.stats().Subscriptions)
}

// TestTakeOverOfTransientSession: a session that is to end with its connection also ends if another connection takes
// over, which asks for no new session (MQTT-3.1.2-6 of MQTT 3.1.1, MQTT 5.0 §3.1.2.11.2).
func TestTakeOverOfTransientSession(t *testing.T) {
	for name, start := range map[string]func(t testing.TB) *server{
		"embedded": func(t testing.TB) *server { return embedded(t, broker.Config{}) }, "mosquitto": mosquittoServer,
	} {
		for _, level := range []byte{4, 5} {
			t.Run(fmt.Sprint(name, level), func(t *testing.T) {
				t.Parallel()
				s := start(t)
				old := dialRaw(t, s.address)
				old.send(connectPacket(level, 2, "twin"))
				require.Zero(t, old.read(t)[2])
				r := dialRaw(t, s.address)
				r.send(connectPacket(level, 0, "twin"))
				assert.Zero(t, r.read(t)[2], "no session is present")
			})
		}
	}
}

// TestKilledKeepsOrder: after a kill, messages with QoS 1 that were not acknowledged come in the order in which they came
// before, so that the last one stays the last (MQTT 5.0 §4.6).
func TestKilledKeepsOrder(t *testing.T) {
	t.Parallel()
	s := process(t)
	r, _ := session(t, s, "away")
	subscribe(t, r, 1, "t", 1)
	pub := dialRaw(t, s.address)
	pub.send(connectPacket(4, 2, "pub"))
	pub.read(t)
	const count = 100
	for i := range count {
		pub.send(packet(0x32, slices.Concat(str("t"), []byte{0, byte(i + 1)}, []byte{byte(i)})))
		if i%3 == 0 {
			r.read(t)
		}
	}
	for range count {
		pub.read(t)
	}
	r = killed(t, s, "away")
	for i := range count {
		got := r.read(t)
		require.Equal(t, byte(i), got[len(got)-1])
	}
}

// TestRetainedFlood: a client that subscribes again and again without reading does not fill the memory with retained
// messages.
func TestRetainedFlood(t *testing.T) {
	t.Parallel()
	s := embedded(t, broker.Config{MaxQueued: 100})
	r := dialRaw(t, s.address)
	r.send(connectPacket(5, 2, "flood"))
	r.read(t)
	for i := range 100 {
		r.send(packet(0x33, slices.Concat(str(fmt.Sprint("r/", i)), []byte{0, byte(i + 1), 0}, []byte("x"))))
		r.read(t)
	}
	r.send(packet(0x82, append([]byte{0, 1, 0}, bytes.Repeat(append(str("r/+"), 1), 1000)...)))
	require.Eventually(t, func() bool { return s.stats().Inflight > 0 }, patience, time.Millisecond)
	require.Less(t, s.stats().Inflight, 500)
	require.NotZero(t, s.stats().Limits["queue"])
}

// TestExpiredMessagesMakeRoom: expired messages in the queue of an absent client are deleted (MQTT-3.3.2-5), and do not
// keep later ones out.
func TestExpiredMessagesMakeRoom(t *testing.T) {
	t.Parallel()
	s := embedded(t, broker.Config{MaxQueued: 2})
	r, _ := session(t, s, "away")
	subscribe(t, r, 1, "t", 1)
	r.conn.Close()
	require.Eventually(t, func() bool { return s.stats().Clients == 0 }, patience, time.Millisecond)
	pub := dialRaw(t, s.address)
	pub.send(connectPacket(5, 2, "pub"))
	pub.read(t)
	publish := func(id byte, payload string) {
		pub.send(packet(0x32, slices.Concat(str("t"), []byte{0, id}, []byte{5, 0x02, 0, 0, 0, 1}, []byte(payload))))
		pub.read(t)
	}
	publish(1, "old")
	publish(2, "old")
	require.Eventually(t, func() bool { return s.stats().Inflight == 0 }, patience, 10*time.Millisecond, "they are deleted")
	publish(3, "new")
	r, _ = session(t, s, "away")
	require.Equal(t, "new", string(r.read(t)[7:]))
}

// TestUpdatesAfterRetained: retained messages with QoS 0 that wait for a client do not keep later updates from it.
func TestUpdatesAfterRetained(t *testing.T) {
	t.Parallel()
	s := embedded(t, broker.Config{MaxQueued: 10, MaxQueuedBytes: 8 << 20})
	pub := dialRaw(t, s.address)
	pub.send(connectPacket(4, 2, "pub"))
	pub.read(t)
	large := bytes.Repeat([]byte("x"), 1<<20)
	for i := range 20 {
		pub.send(packet(0x33, slices.Concat(str(fmt.Sprint("r/", i)), []byte{0, 1}, large)))
		pub.read(t)
	}
	r := dialRaw(t, s.address)
	r.send(connectPacket(4, 2, "reader"))
	r.read(t)
	r.send(packet(0x82, slices.Concat([]byte{0, 1}, str("r/+"), []byte{0})))
	r.read(t)
	for range 2 {
		pub.send(packet(0x32, slices.Concat(str("r/1"), []byte{0, 1}, []byte("update"))))
		pub.read(t)
	}
	require.Zero(t, s.stats().Dropped)
}

// TestSessionsAreBounded: a client with ever new identifiers does not fill the disk with sessions. Clients without a
// persistent session, and those that have one, are served.
func TestSessionsAreBounded(t *testing.T) {
	t.Parallel()
	s := embedded(t, broker.Config{MaxClients: 2})
	for i := range 200 {
		r := dialRaw(t, s.address)
		r.send(connectPacket(4, 0, fmt.Sprint("client", i)))
		require.Equal(t, []byte{0x20, 2, 0, 0}, r.read(t))
		r.send([]byte{0xe0, 0})
		_, _ = r.conn.Read(make([]byte, 1))
		require.Eventually(t, func() bool { return s.stats().Clients == 0 }, patience, time.Millisecond)
	}
	r := dialRaw(t, s.address)
	r.send(connectPacket(4, 0, "client200"))
	require.Equal(t, []byte{0x20, 2, 0, 3}, r.read(t))
	r = dialRaw(t, s.address)
	r.send(connectPacket(4, 2, "transient"))
	require.Equal(t, []byte{0x20, 2, 0, 0}, r.read(t))
	_, kept := session(t, s, "client7")
	require.True(t, kept)
}

// TestSharedMessagesOutliveStop: what a transient member of a shared subscription has not acknowledged when the broker
// stops goes to a persistent member.
func TestSharedMessagesOutliveStop(t *testing.T) {
	t.Parallel()
	s := embedded(t, broker.Config{})
	away, _ := session(t, s, "away")
	subscribe(t, away, 1, "$share/g/t", 1)
	away.conn.Close()
	require.Eventually(t, func() bool { return s.stats().Clients == 0 }, patience, time.Millisecond)
	member := dialRaw(t, s.address)
	member.send(connectPacket(4, 2, "transient"))
	member.read(t)
	subscribe(t, member, 1, "$share/g/t", 1)
	pub := dialRaw(t, s.address)
	pub.send(connectPacket(4, 2, "pub"))
	pub.read(t)
	for i := range 3 {
		pub.send(packet(0x32, slices.Concat(str("t"), []byte{0, 1, byte('1' + i)})))
		pub.read(t)
		member.read(t)
	}
	s.stop(t)
	s.start(t)
	away, _ = session(t, s, "away")
	for i := range 3 {
		got := away.read(t)
		require.Equal(t, byte('1'+i), got[len(got)-1])
	}
}
