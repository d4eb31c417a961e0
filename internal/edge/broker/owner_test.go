package broker_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// TestSessionOfAnotherUser checks that a session, connected or not, also after a restart, goes only to its user: nobody
// else gets its messages, ends it or disconnects its client. Messages that the rules forbid in the meantime stay away. If
// the user is not configured any more, the session has ended.
func TestSessionOfAnotherUser(t *testing.T) {
	path := filepath.Join(t.TempDir(), "broker.db")
	users := []broker.User{
		{Name: "alice", Read: []string{"secret/#", "open/#"}}, {Name: "bob", Read: []string{"open/#"}}, {Name: "writer", Write: []string{"#"}},
	}
	s := embedded(t, broker.Config{Path: path, Users: users})
	const resume, clean = 0x80, 0x82 // a user name without a password, without and with Clean Session
	open := func(flags byte, user string) (*raw, []byte) {
		r := dialRaw(t, s.address)
		r.send(connectPacket(4, flags, "session", user))
		return r, r.read(t)
	}
	refused := func(when string) {
		t.Helper()
		for _, flags := range []byte{resume, clean} {
			r, answer := open(flags, "bob")
			require.Equal(t, []byte{0x20, 2, 0, 2}, answer, "%s: Connection Refused, identifier rejected", when)
			_, err := r.conn.Read(make([]byte, 1))
			require.Error(t, err, "%s: the connection stays open", when)
		}
	}
	alice, answer := open(resume, "alice")
	require.Equal(t, []byte{0x20, 2, 0, 0}, answer)
	alice.send(packet(0x82, append([]byte{0, 1}, append(str("secret/#"), 1)...)))
	require.Equal(t, []byte{0x90, 3, 0, 1, 1}, alice.read(t))
	refused("alice is connected")
	alice.send([]byte{0xc0, 0})
	require.Equal(t, []byte{0xd0, 0}, alice.read(t), "alice is not disconnected")
	alice.conn.Close()

	writer, _ := connect(t, s, mqtt.Config{Protocol: 4, Username: "writer"})
	require.NoError(t, writer.Publish(patient(t), "secret/x", 1, false, []byte("for alice")))
	require.Eventually(t, func() bool { return writer.Stats().Queued == 0 }, patience, time.Millisecond)
	refused("alice is away")
	require.NoError(t, writer.Close(patient(t)))
	s.stop(t)
	s.start(t)
	refused("after a restart")
	alice, answer = open(resume, "alice")
	require.Equal(t, []byte{0x20, 2, 1, 0}, answer, "the session is there")
	require.Contains(t, string(alice.read(t)), "for alice")
	alice.conn.Close() // without an acknowledgement

	s.stop(t)
	users[0].Read = []string{"open/#"}
	s = embedded(t, broker.Config{Path: path, Users: users})
	alice, answer = open(resume, "alice")
	require.Equal(t, []byte{0x20, 2, 1, 0}, answer)
	alice.send([]byte{0xc0, 0})
	require.Equal(t, []byte{0xd0, 0}, alice.read(t), "a message that alice may not read any more was sent")
	alice.conn.Close()

	s.stop(t)
	s = embedded(t, broker.Config{Path: path, Users: users[1:]})
	_, answer = open(resume, "bob")
	require.Equal(t, []byte{0x20, 2, 0, 0}, answer, "the session of a user that does not exist any more has ended")
}
