package broker

import (
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// onDisk is what a broker finds on the disk if it is killed now: the payloads queued for a client, and the identifiers
// of the messages with QoS 2 that another client has yet to release.
func onDisk(t *testing.T, s *store, receiver, sender string) (queued map[string]bool, received []uint16) {
	queued = map[string]bool{}
	bodies := map[uint64]string{}
	require.NoError(t, s.each("", func(key string, value []byte) error {
		switch {
		case strings.HasPrefix(key, bodyKey): // these come first
			var b body
			require.NoError(t, json.Unmarshal(value, &b))
			id, err := strconv.ParseUint(key[len(bodyKey):], 16, 64)
			require.NoError(t, err)
			bodies[id] = string(b.Payload)
		case strings.HasPrefix(key, messageKey+receiver+nul):
			var e entryRecord
			require.NoError(t, json.Unmarshal(value, &e))
			queued[bodies[e.Message]] = true
		case strings.HasPrefix(key, receivedKey+sender+nul):
			id, err := strconv.ParseUint(key[strings.LastIndex(key, nul)+1:], 16, 16)
			require.NoError(t, err)
			received = append(received, uint16(id))
		}
		return nil
	}))
	return queued, received
}

// TestKilledAtAnyCommit: whichever transaction is the last before a SIGKILL, the disk has either both a message and its
// packet identifier, or neither. With the identifier alone, the next broker would take the message, which its sender
// sends again, for a duplicate. With the message alone, it would pass the message on twice.
func TestKilledAtAnyCommit(t *testing.T) {
	b, err := New(Config{Address: "127.0.0.1:0", Path: filepath.Join(t.TempDir(), "broker.db")})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(context.Background())) })
	s := b.(*server).store
	client := func(id string) func(p packet.Packet) {
		c, err := net.Dial("tcp", b.Addresses()[0])
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		send := func(p packet.Packet) {
			_, err := c.Write(packet.Append(nil, p, 4))
			require.NoError(t, err)
		}
		send(&packet.Connect{ClientID: id})
		return send
	}
	away := client("away")
	away(&packet.Subscribe{ID: 1, Filters: []packet.Subscription{{Filter: "t", QoS: 2}}})
	require.Eventually(t, func() bool { return b.Stats().Subscriptions == 1 }, time.Minute, time.Millisecond)
	away(&packet.End{Type: packet.DISCONNECT})
	require.Eventually(t, func() bool { return b.Stats().Clients == 0 }, time.Minute, time.Millisecond)

	const count = 1000
	go func() {
		publish := client("pub")
		for i := range count {
			publish(&packet.Publish{QoS: 2, ID: uint16(i + 1), Topic: "t", Payload: []byte(strconv.Itoa(i + 1))})
		}
	}()
	for all := 0; all < count; {
		s.put("other", []byte("x"), true) // one transaction follows the other
		s.wait()
		queued, received := onDisk(t, s, "away", "pub")
		for _, id := range received {
			require.True(t, queued[strconv.Itoa(int(id))], "if the broker is killed now, message %d is lost", id)
		}
		require.Len(t, queued, len(received), "if the broker is killed now, a message comes twice")
		all = len(received)
	}
	queued, _ := onDisk(t, s, "away", "pub")
	assert.Len(t, queued, count)
}
