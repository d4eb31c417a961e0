package broker

import (
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/bbolt"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// TestConvert opens a file that the first version of the store has written: the session continues with its subscription
// and its messages, and the retained message is there.
func TestConvert(t *testing.T) {
	path := filepath.Join(t.TempDir(), "broker.db")
	db, err := bbolt.Open(path, 0o600, nil)
	require.NoError(t, err)
	require.NoError(t, db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucket(bucket1)
		for key, value := range map[string]string{
			"cnode":        `{"will":{},"properties":{"sessionExpiryInterval":3600,"maximumPacketSize":16777216,"sessionExpiryIntervalFlag":true},"username":"YWxpY2U=","id":"node","t":"","remote":"","listener":"tcp","protocolVersion":5,"clean":false}`,
			"mnode\x002":   `{"properties":{"subscriptionIdentifier":[0]},"payload":"b25l","origin":"tripod-6e36420324fa41b4","topic_name":"t/1","fixedheader":{"remaining":11,"type":3,"qos":1,"dup":false,"retain":false},"created":1099511627777,"packet_id":2}`,
			"mnode\x003":   `{"properties":{"user":[{"k":"key","v":"value"}]},"payload":"dHdv","origin":"tripod-6e36420324fa41b4","topic_name":"t/2","fixedheader":{"remaining":11,"type":3,"qos":2,"dup":false,"retain":false},"created":1099511627778,"packet_id":3}`,
			"qnode\x001f":  "",
			"rt/r":         `{"properties":{},"payload":"a2VwdA==","origin":"tripod-6e36420324fa41b4","topic_name":"t/r","fixedheader":{"remaining":12,"type":3,"qos":1,"dup":false,"retain":true},"created":1099511627779,"packet_id":3}`,
			"snode\x00t/#": `{"client":"node","filter":"t/#","qos":2}`,
			"mnode\x00ff":  `not JSON`,
		} {
			require.NoError(t, b.Put([]byte(key), []byte(value)))
		}
		return err
	}))
	require.NoError(t, db.Close())
	for range 2 { // the second time, there is nothing to convert
		b, err := New(Config{Address: "127.0.0.1:0", Path: path, Users: []User{{Name: "alice", Realms: []string{"t"}}},
			Log: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		st := b.Stats()
		assert.Equal(t, Stats{Sessions: 1, Subscriptions: 1, Retained: 1, Inflight: 2, Limits: st.Limits}, st)
		c, err := net.Dial("tcp", b.Addresses()[0])
		require.NoError(t, err)
		require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
		hello := &packet.Connect{ClientID: "node", HasUsername: true, Username: "alice",
			Properties: (&packet.Properties{}).SetNumber(packet.SessionExpiry, 3600)}
		_, err = c.Write(packet.Append(nil, hello, 5))
		require.NoError(t, err)
		r := reader{conn: newConn(c, b.(*server))}
		got := map[string]*packet.Publish{}
		for i := range 3 {
			first, body, _, err := r.next(0, 1<<20, 5)
			require.NoError(t, err)
			p, err := packet.Decode(first, append([]byte{}, body...), 5)
			require.NoError(t, err)
			if i == 0 {
				assert.True(t, p.(*packet.Connack).SessionPresent)
				continue
			}
			m := p.(*packet.Publish)
			got[m.Topic+" "+string(m.Payload)] = m
		}
		assert.Contains(t, got, "t/1 one")
		if two := got["t/2 two"]; assert.NotNil(t, two) {
			assert.Equal(t, []any{uint16(3), true, []packet.User{{Name: "key", Value: "value"}}}, []any{two.ID, two.Dup, two.Properties.User()})
		}
		assert.True(t, b.(*server).sessions["node"].isReceived(0x1f))
		require.NoError(t, c.Close())
		require.NoError(t, b.Close(t.Context()))
	}
}
