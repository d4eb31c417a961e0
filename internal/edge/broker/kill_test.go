package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mochi-mqtt/server/v2/hooks/storage"
	"github.com/mochi-mqtt/server/v2/packets"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// onDisk is what a broker finds on the disk if it is killed now: the payloads queued for a client, and the identifiers
// of the messages with QoS 2 that another client has yet to release.
func onDisk(t *testing.T, s *store, receiver, sender string) (queued map[string]bool, received []uint16) {
	queued = map[string]bool{}
	require.NoError(t, s.each("", func(key string, value []byte) error {
		switch {
		case strings.HasPrefix(key, messageKey+receiver+nul):
			var m storage.Message
			require.NoError(t, json.Unmarshal(value, &m))
			queued[string(m.Payload)] = true
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
	s := b.(*embedded).store
	client := func(id string) func(pk packets.Packet) {
		c, err := net.Dial("tcp", b.Addresses()[0])
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		send := func(pk packets.Packet) {
			var buf bytes.Buffer
			require.NoError(t, map[byte]func(*bytes.Buffer) error{
				packets.Connect: pk.ConnectEncode, packets.Subscribe: pk.SubscribeEncode, packets.Publish: pk.PublishEncode, packets.Disconnect: pk.DisconnectEncode,
			}[pk.FixedHeader.Type](&buf))
			_, err := c.Write(buf.Bytes())
			require.NoError(t, err)
		}
		send(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Connect}, ProtocolVersion: 4, Connect: packets.ConnectParams{ProtocolName: []byte("MQTT"), ClientIdentifier: id}})
		return send
	}
	away := client("away")
	away(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Subscribe, Qos: 1}, ProtocolVersion: 4, PacketID: 1, Filters: packets.Subscriptions{{Filter: "t", Qos: 2}}})
	require.Eventually(t, func() bool { return b.Stats().Subscriptions == 1 }, time.Minute, time.Millisecond)
	away(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Disconnect}, ProtocolVersion: 4})
	require.Eventually(t, func() bool { return b.Stats().Clients == 0 }, time.Minute, time.Millisecond)

	const count = 1000
	go func() {
		publish := client("pub")
		for i := range count {
			publish(packets.Packet{
				FixedHeader: packets.FixedHeader{Type: packets.Publish, Qos: 2}, ProtocolVersion: 4, PacketID: uint16(i + 1), TopicName: "t", Payload: []byte(strconv.Itoa(i + 1)),
			})
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

// TestStoredPubrec reads the PUBREC that previous versions stored among the messages for a client.
func TestStoredPubrec(t *testing.T) {
	s, err := openStore(filepath.Join(t.TempDir(), "broker.db"), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	s.put(messageKey+"pub"+nul+"1f", []byte(`{"packet_id":31,"fixedheader":{"type":5}}`), false)
	s.put(messageKey+"pub"+nul+"20", []byte(`{"packet_id":32,"fixedheader":{"type":3,"qos":1},"created":1099511627780}`), true)
	s.wait()
	h := &hooks{store: s, clients: map[string]string{"pub": ""}, stored: map[string]*queueSizes{}, received: map[string]map[uint16]struct{}{}, bytes: 1}
	for range 2 { // the second time from its new key
		messages, err := h.StoredInflightMessages()
		require.NoError(t, err)
		require.Len(t, messages, 1)
		assert.Equal(t, uint16(32), messages[0].PacketID)
		assert.True(t, h.isReceived("pub", 31))
		h.received = map[string]map[uint16]struct{}{}
		s.put("other", []byte("x"), true)
		s.wait()
	}
	h.clients = nil // the session has ended
	messages, err := h.StoredInflightMessages()
	require.NoError(t, err)
	assert.Empty(t, messages)
	assert.False(t, h.isReceived("pub", 31))
	require.NoError(t, s.close())
}
