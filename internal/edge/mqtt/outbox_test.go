package mqtt

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

func one(topic string) *item { return &item{topic: topic, payload: []byte("x"), qos: 1} }

func unreported(loss, int) {}

func topics(o *outbox) (names []string) {
	for it := o.next(1000); it != nil; it = o.next(1000) {
		names = append(names, it.topic)
	}
	return names
}

func TestOutboxDropsOldestWhileAway(t *testing.T) {
	ctx := context.Background()
	o := newOutbox(3, 1000, time.Hour, unreported)
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		require.NoError(t, o.add(ctx, one(name)))
	}
	queued, _, dropped := o.stats()
	assert.Equal(t, 3, queued)
	assert.Equal(t, uint64(2), dropped)
	assert.Equal(t, []string{"c", "d", "e"}, topics(o))

	require.NoError(t, o.add(ctx, one("f")), "all is in flight: this one is dropped")
	_, _, dropped = o.stats()
	assert.Equal(t, uint64(3), dropped)

	o = newOutbox(100, 10, time.Hour, unreported)
	require.NoError(t, o.add(ctx, &item{topic: "a", payload: make([]byte, 5)}))
	require.NoError(t, o.add(ctx, &item{topic: "b", payload: make([]byte, 8)}))
	assert.Equal(t, []string{"b"}, topics(o), "by bytes")
	assert.ErrorIs(t, o.add(ctx, &item{topic: "c", payload: make([]byte, 10)}), errdefs.ErrResourceExhausted)
}

func TestOutboxWaitsForRoomWhileConnected(t *testing.T) {
	o := newOutbox(2, 1000, time.Hour, unreported)
	o.resume(false)
	ctx, cancel := context.WithCancel(context.Background())
	require.NoError(t, o.add(ctx, one("a")))
	require.NoError(t, o.add(ctx, one("b")))
	added := make(chan error)
	go func() { added <- o.add(ctx, one("c")) }()
	it := o.next(1)
	assert.Nil(t, o.next(1), "the window")
	o.done(it.id, 0)
	require.NoError(t, <-added)
	go func() { added <- o.add(ctx, one("d")) }()
	cancel()
	assert.ErrorIs(t, <-added, context.Canceled)

	go func() { added <- o.add(context.Background(), one("e")) }()
	o.disconnected(false) // from now on the oldest is dropped
	require.NoError(t, <-added)
	_, published, dropped := o.stats()
	assert.Equal(t, []uint64{1, 1}, []uint64{published, dropped})
	o.close()
	assert.ErrorIs(t, o.add(context.Background(), one("f")), errdefs.ErrFailedPrecondition)
	queued, _, dropped := o.stats()
	assert.Zero(t, queued)
	assert.Equal(t, uint64(3), dropped)
}

func TestOutboxTimeToLive(t *testing.T) {
	o := newOutbox(10, 1000, time.Millisecond, unreported)
	require.NoError(t, o.add(context.Background(), one("old")))
	o.mu.Lock()
	o.expire(time.Now().Add(time.Second))
	o.mu.Unlock()
	assert.Empty(t, topics(o))
	_, _, dropped := o.stats()
	assert.Equal(t, uint64(1), dropped)
}

func TestOutboxSessions(t *testing.T) {
	ctx := context.Background()
	o := newOutbox(10, 1000, time.Hour, unreported)
	for _, name := range []string{"a", "b", "c", "d"} {
		require.NoError(t, o.add(ctx, one(name)))
	}
	a, b, c := o.next(10), o.next(10), o.next(10)
	assert.True(t, o.release(b.id), "the broker has b")
	assert.False(t, o.release(b.id+1000))

	again := o.resume(true)
	require.Len(t, again, 3, "the same, under the same identifiers, in their order")
	assert.Equal(t, []uint16{a.id, b.id, c.id}, []uint16{again[0].id, again[1].id, again[2].id})
	assert.True(t, again[1].released)

	assert.Empty(t, o.resume(false), "the broker has forgotten us")
	assert.Equal(t, []string{"a", "c", "d"}, topics(o))
	_, published, _ := o.stats()
	assert.Equal(t, uint64(1), published)
}

func TestOutboxReasons(t *testing.T) {
	o := newOutbox(10, 1000, time.Hour, unreported)
	require.NoError(t, o.add(context.Background(), one("a")))
	it := o.next(10)
	id := it.id
	o.done(id, packet.IDInUse)
	it = o.next(10)
	assert.NotEqual(t, id, it.id, "once more, under another identifier")
	o.done(it.id, packet.NotAuthorized)
	queued, published, dropped := o.stats()
	assert.Equal(t, []uint64{0, 0, 1}, []uint64{uint64(queued), published, dropped})
	assert.Nil(t, o.done(it.id, 0), "an answer nobody waits for")
}

func TestOutboxPoison(t *testing.T) {
	o := newOutbox(10, 1000, time.Hour, unreported)
	require.NoError(t, o.add(context.Background(), one("poison")))
	require.NoError(t, o.add(context.Background(), one("good")))
	for i := range maxTries {
		o.resume(i%2 == 0)
		topics(o)
		if it := o.disconnected(true); i < maxTries-1 {
			require.Nil(t, it)
		} else {
			assert.Equal(t, "poison", it.topic)
		}
	}
	o.resume(false)
	assert.Equal(t, []string{"good"}, topics(o))
	for range 2 * maxTries { // connections that lasted do not count
		o.disconnected(false)
		o.resume(true)
	}
	_, _, dropped := o.stats()
	assert.Equal(t, uint64(1), dropped)
}

// TestLosses checks that each reason for a drop is reported with the message's topic.
func TestLosses(t *testing.T) {
	ctx := context.Background()
	got := map[loss]int{}
	report := func(l loss, n int) { got[l] += n }
	o := newOutbox(2, 1000, time.Hour, report)
	for _, name := range []string{"a", "b", "c"} {
		require.NoError(t, o.add(ctx, one(name)))
	}
	o.resume(false)
	b := o.next(1)
	o.done(b.id, packet.NotAuthorized)
	require.NoError(t, o.add(ctx, one("d")))
	topics(o)
	o.disconnected(false)
	require.NoError(t, o.add(ctx, one("e")), "all is in flight")
	o.close()
	o = newOutbox(2, 1000, time.Hour, report)
	require.NoError(t, o.add(ctx, one("f")))
	o.expire(time.Now().Add(2 * time.Hour))
	o.resume(false)
	require.NoError(t, o.add(ctx, one("poison")))
	for range maxTries {
		o.resume(true)
		topics(o)
		o.disconnected(true)
	}
	in := newInbox(1, 1000, report)
	in.add(Message{Topic: "x"}, nil)
	in.add(Message{Topic: "y"}, nil)
	assert.Equal(t, map[loss]int{
		{"a", noRoom}: 1, {"b", refused}: 1, {"c", closing}: 1, {"d", closing}: 1, {"e", noRoom}: 1, {"f", tooOld}: 1, {"poison", refused}: 1,
		{"x", unread}: 1,
	}, got)
}

func TestInbox(t *testing.T) {
	b := newInbox(2, 10, unreported)
	for _, m := range []Message{{Topic: "a"}, {Topic: "b", QoS: 1}, {Topic: "c"}, {Topic: "d"}, {Topic: "e", QoS: 2}} {
		b.add(m, nil)
	}
	var got string
	for range 4 {
		a, ok := b.next()
		require.True(t, ok)
		got += a.Topic
	}
	assert.Equal(t, "bcde", got, "the oldest with QoS 0 has gone, and the order is kept")
	b.add(Message{Topic: "x", Payload: make([]byte, 100)}, nil)
	b.add(Message{Topic: "y", Payload: make([]byte, 100)}, nil)
	a, _ := b.next()
	assert.Equal(t, "y", a.Topic, "one is taken, however large")
	waiting, received, dropped := b.stats()
	assert.Equal(t, []uint64{0, 5, 2}, []uint64{uint64(waiting), received, dropped})
	go b.close()
	_, ok := b.next()
	assert.False(t, ok)
}

// TestSettled checks that a message is settled once the outbox no longer keeps it, for whatever reason, and not by close; and
// that it waits for room even without a connection.
func TestSettled(t *testing.T) {
	var settled, dropped []string
	o := newOutbox(2, 1000, time.Hour, func(l loss, _ int) { dropped = append(dropped, l.topic) })
	add := func(name string) {
		t.Helper()
		require.NoError(t, o.add(t.Context(),
			&item{topic: name, qos: 1, settled: func(delivered bool) { settled = append(settled, fmt.Sprint(name, delivered)) }}))
	}
	require.NoError(t, o.add(t.Context(), &item{topic: "plain", qos: 1}))
	add("a")
	require.NoError(t, o.add(t.Context(), &item{topic: "newer", qos: 1}))
	require.Equal(t, []string{"plain"}, dropped)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, o.add(ctx, &item{topic: "b", qos: 1, settled: func(bool) {}}), context.Canceled)
	o.resume(false)
	a, newer := o.next(10), o.next(10)
	o.done(newer.id, packet.Success)
	o.done(a.id, packet.Success)
	require.Equal(t, []string{"atrue"}, settled)
	add("b")
	o.done(o.next(10).id, packet.NotAuthorized)
	require.Equal(t, []string{"atrue", "bfalse"}, settled, "the broker refused it")
	add("expired")
	o.expire(time.Now().Add(2 * time.Hour))
	require.Equal(t, []string{"atrue", "bfalse", "expiredfalse"}, settled)
	add("kept")
	o.close()
	require.Equal(t, []string{"atrue", "bfalse", "expiredfalse"}, settled, "the next process sends it")
}
