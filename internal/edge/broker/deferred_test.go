package broker

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// TestDeferredWillOutlivesStarts: each start of the broker gives the clients of the previous one the same time to come
// back, also if several starts follow each other.
func TestDeferredWillOutlivesStarts(t *testing.T) {
	cfg := Config{Address: "127.0.0.1:0", Path: filepath.Join(t.TempDir(), "broker.db")}
	b, err := New(cfg)
	require.NoError(t, err)
	c, err := net.Dial("tcp", b.Addresses()[0])
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Write(packet.Append(nil, &packet.Connect{ClientID: "mortal", Will: &packet.Will{Topic: "will"}}, 4))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return b.Stats().Clients == 1 }, time.Minute, time.Millisecond)
	for range 3 {
		require.NoError(t, b.Close(context.Background()))
		b, err = New(cfg)
		require.NoError(t, err)
		s := b.(*server)
		s.mu.Lock()
		require.True(t, s.wills["mortal"].deferred)
		s.mu.Unlock()
	}
	require.NoError(t, b.Close(context.Background()))
}
