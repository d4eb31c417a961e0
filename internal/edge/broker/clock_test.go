package broker

import (
	"context"
	"encoding/json"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// TestClockWhileRunning: in memory, what expires has a reading of the monotonic clock, so no change to the wall clock
// matters. That includes what was loaded from the disk.
func TestClockWhileRunning(t *testing.T) {
	p := &packet.Publish{Topic: "t", Properties: &packet.Properties{}}
	p.Properties.SetNumber(packet.MessageExpiry, 60)
	m := newMessage(p, "t", "c", time.Now())
	stored := m.body()
	loaded := stored.message()
	for _, one := range []*message{m, &loaded} {
		assert.Contains(t, one.expires.String(), " m=+")
		assert.InDelta(t, 60, time.Until(one.expires).Seconds(), 5)
	}
	assert.NotContains(t, stored.Expires.String(), " m=", "on the disk it is wall time")
}

// written makes a broker's file with the given values.
func written(t *testing.T, values map[string]any) (path string) {
	path = filepath.Join(t.TempDir(), "broker.db")
	s, err := openStore(path, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	for key, v := range values {
		data, err := json.Marshal(v)
		require.NoError(t, err)
		s.put(key, data, true)
	}
	require.NoError(t, s.close())
	return path
}

// stored reads one value of a broker's file.
func stored[T any](t *testing.T, path, key string) (v T, found bool) {
	s, err := openStore(path, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.NoError(t, s.each(key, func(_ string, value []byte) error {
		found = true
		return json.Unmarshal(value, &v)
	}))
	require.NoError(t, s.close())
	return v, found
}

// TestClockJumps starts brokers whose clock differs by ten years from that of the broker that wrote the file.
func TestClockJumps(t *testing.T) {
	const years = 10 * 365 * 24 * time.Hour
	file := func(wrote time.Time, lasts time.Duration) map[string]any {
		w := willRecord{body: body{Topic: "will", Payload: []byte("x"), Retain: true}, Delay: lasts, Grace: lasts, Due: wrote.Add(lasts)}
		m := body{Topic: "retained", Payload: []byte("x"), Expires: wrote.Add(lasts), Left: lasts}
		return map[string]any{
			clientKey + "away": sessionRecord{Expiry: lasts, Ended: wrote}, willKey + "away" + nul + number(1): w,
			bodyKey + number(2): m, retainedKey + "retained": 2, messageKey + "away" + nul + number(1): entryRecord{Message: 2, QoS: 1},
		}
	}
	start := func(t *testing.T, path string) *server {
		b, err := New(Config{Address: "127.0.0.1:0", Path: path})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, b.Close(context.Background())) })
		return b.(*server)
	}
	t.Run("forwards", func(t *testing.T) {
		s := start(t, written(t, file(time.Now().Add(-years), time.Hour)))
		require.Eventually(t, func() bool { return s.Stats().Sessions == 0 }, time.Minute, time.Millisecond, "the session has ended")
		require.Eventually(t, func() bool { return s.Stats().Retained == 1 }, time.Minute, time.Millisecond,
			"the message has expired, and the will is published")
	})
	t.Run("back", func(t *testing.T) {
		path := written(t, file(time.Now().Add(years), time.Hour))
		s := start(t, path)
		s.mu.RLock()
		away := s.sessions["away"]
		require.NotNil(t, away, "the session has not ended")
		assert.WithinDuration(t, time.Now(), away.ended, time.Minute)
		require.Equal(t, 1, away.waiting.len())
		assert.WithinDuration(t, time.Now().Add(time.Hour), (*away.waiting.first()).expires, time.Minute)
		assert.WithinDuration(t, time.Now().Add(time.Hour), s.wills["away"].due, time.Minute)
		s.mu.RUnlock()
		require.NoError(t, s.Close(context.Background()))
		session, _ := stored[sessionRecord](t, path, clientKey+"away")
		assert.WithinDuration(t, time.Now(), session.Ended, time.Minute, "another start does not prolong it")
		m, _ := stored[body](t, path, bodyKey)
		assert.WithinDuration(t, time.Now().Add(time.Hour), m.Expires, time.Minute)
		w, _ := stored[willRecord](t, path, willKey)
		assert.WithinDuration(t, time.Now().Add(time.Hour), w.Due, time.Minute)
	})
	t.Run("back, and then time passes", func(t *testing.T) {
		s := start(t, written(t, file(time.Now().Add(years), time.Second)))
		assert.Equal(t, 1, s.Stats().Sessions)
		require.Eventually(t, func() bool { return s.Stats().Sessions == 0 }, time.Minute, time.Millisecond, "the session ends")
		require.Eventually(t, func() bool {
			s.removeExpired()
			return s.Stats().Retained == 1
		}, time.Minute, time.Millisecond, "the message expires, and the will is published")
	})
}

// TestKilledSessionEnds: the session of a client that was connected when the broker was killed ends in time, however often
// the broker is killed later. What the client may have got stays in flight.
func TestKilledSessionEnds(t *testing.T) {
	path := written(t, map[string]any{
		clientKey + "c": sessionRecord{Expiry: time.Hour}, bodyKey + number(1): body{Topic: "t"},
		messageKey + "c" + nul + number(1): entryRecord{Message: 1, QoS: 2, ID: 7},
	})
	for range 2 {
		b, err := New(Config{Address: "127.0.0.1:0", Path: path})
		require.NoError(t, err)
		s := b.(*server)
		s.mu.RLock()
		c := s.sessions["c"]
		require.Contains(t, c.flight, uint16(7))
		assert.True(t, c.flight[7].dup)
		s.mu.RUnlock()
		require.NoError(t, b.Close(context.Background()))
		record, _ := stored[sessionRecord](t, path, clientKey)
		assert.True(t, record.Ended.Equal(c.ended), "stored %v, in memory %v", record.Ended, c.ended)
	}
}
