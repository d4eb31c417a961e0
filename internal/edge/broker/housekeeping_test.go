package broker

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestExpiredRetained checks that housekeeping removes retained messages that have expired, also those that an earlier
// broker has stored or that replaced others, and no others.
func TestExpiredRetained(t *testing.T) {
	cfg := Config{Address: "127.0.0.1:0", Path: filepath.Join(t.TempDir(), "broker.db")}
	b, err := New(cfg)
	require.NoError(t, err)
	retain := func(topic string, expires time.Time) {
		require.NoError(t, b.(*server).publish(&message{topic: topic, payload: []byte("x"), retain: true, expires: expires}, nil))
	}
	later := time.Now().Add(time.Hour)
	retain("forever", time.Time{})
	retain("later", later)
	retain("replaced", later)
	retain("replaced", time.Time{})
	retain("stored", time.Now().Add(50*time.Millisecond))
	require.NoError(t, b.Close(t.Context()))
	b, err = New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(context.Background())) })
	s := b.(*server)
	retain("gone", time.Now().Add(-time.Second))
	require.Eventually(t, func() bool {
		s.removeExpired()
		return b.Stats().Retained == 3
	}, time.Minute, 10*time.Millisecond)
	assert.Equal(t, 1, s.expiring)
	for _, topic := range []string{"forever", "later", "replaced"} {
		require.NotNil(t, s.tree.at(topic, false), topic)
	}
}
