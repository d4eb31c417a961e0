package broker

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/packet"
	"github.com/tripod-run/tripod/test/until"
)

// idler is a client that leaves its connection idle, and the connection on the broker's side.
type idler struct {
	net.Conn
	conn *conn
}

// parker starts a broker for idle clients, and returns the limiter of its connections.
func parker(t *testing.T) (*server, *connlimit.Limiter) {
	limit := connlimit.NewGroup(slog.New(slog.DiscardHandler)).Limiter("broker", connlimit.Config{})
	b, err := New(Config{Address: "127.0.0.1:0", Connections: limit})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(context.Background())) })
	return b.(*server), limit
}

// idle connects with MQTT 5.0, and returns once the connection is parked.
func idle(t *testing.T, s *server, id string, keepAlive uint16) *idler {
	t.Helper()
	i := dialIdle(t, s, id, keepAlive)
	i.parks(t)
	return i
}

func dialIdle(t *testing.T, s *server, id string, keepAlive uint16) *idler {
	t.Helper()
	c, err := net.Dial("tcp", s.addresses[0])
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	i := &idler{Conn: c}
	i.send(t, &packet.Connect{Level: 5, ClientID: id, CleanStart: true, KeepAlive: keepAlive})
	require.Equal(t, packet.CONNACK, i.read(t))
	s.mu.RLock()
	one := s.sessions[id]
	s.mu.RUnlock()
	one.mu.Lock()
	i.conn = one.conn
	one.mu.Unlock()
	return i
}

func (i *idler) send(t *testing.T, p packet.Packet) {
	t.Helper()
	_, err := i.Write(packet.Append(nil, p, 5))
	require.NoError(t, err)
}

// read reads a packet of less than 128 bytes.
func (i *idler) read(t *testing.T) packet.Type {
	t.Helper()
	head := make([]byte, 2)
	_, err := io.ReadFull(i, head)
	require.NoError(t, err)
	_, err = io.ReadFull(i, make([]byte, head[1]))
	require.NoError(t, err)
	return packet.Type(head[0] >> 4)
}

// ends checks that the last packet is a DISCONNECT with the given code.
func (i *idler) ends(t *testing.T, code packet.Code) {
	t.Helper()
	got, err := io.ReadAll(i)
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(got), 3)
	require.Equal(t, []byte{byte(packet.DISCONNECT) << 4, got[1], byte(code)}, got[:3])
}

func (i *idler) ping(t *testing.T) {
	t.Helper()
	i.send(t, &packet.Ping{Type: packet.PINGREQ})
	require.Equal(t, packet.PINGRESP, i.read(t))
}

func (i *idler) detached() bool {
	i.conn.socket.mu.Lock()
	defer i.conn.socket.mu.Unlock()
	return i.conn.socket.at == nil
}

func (i *idler) parks(t *testing.T) {
	t.Helper()
	until.Holds(t, "the connection is parked", func() bool {
		p := i.conn.server.parking
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.parked[i.conn.ticket] == i.conn && i.detached()
	})
}

// TestParkedConnection: what happens to a connection while it is only a descriptor in the epoll instance.
func TestParkedConnection(t *testing.T) {
	for name, happens := range map[string]func(t *testing.T, s *server, i *idler){
		"sends a packet": func(t *testing.T, _ *server, i *idler) {
			for range 3 {
				i.ping(t)
				i.parks(t)
			}
		},
		"sends packets fast": func(t *testing.T, _ *server, i *idler) {
			until.Holds(t, "the connection is attached", func() bool {
				for range 2 * attachAfter {
					i.ping(t)
				}
				return !i.detached()
			})
			i.parks(t)
			i.ping(t)
		},
		"sends a packet in parts": func(t *testing.T, _ *server, i *idler) {
			whole := packet.Append(nil, &packet.Subscribe{ID: 1, Filters: []packet.Subscription{{Filter: "parts"}}}, 5)
			_, err := i.Write(whole[:5])
			require.NoError(t, err)
			until.Holds(t, "the connection is attached", func() bool { return !i.detached() })
			_, err = i.Write(whole[5:])
			require.NoError(t, err)
			require.Equal(t, packet.SUBACK, i.read(t))
			i.parks(t)
		},
		"gets a message": func(t *testing.T, s *server, i *idler) {
			i.subscribes(t, "small")
			require.NoError(t, s.publish(&message{topic: "small", payload: []byte("x")}, nil))
			require.Equal(t, packet.PUBLISH, i.read(t))
			require.True(t, i.detached(), "the kernel has room for a small packet")
			i.ping(t)
		},
		"gets more than the kernel takes": func(t *testing.T, s *server, i *idler) {
			i.subscribes(t, "large")
			m := &message{topic: "large", payload: make([]byte, 32<<20)}
			d := delivery{message: m}
			want := len(d.appendPublish(nil, 5, 0, false, m.topic, 0, time.Now()))
			require.NoError(t, s.publish(m, nil))
			until.Holds(t, "the connection is attached", func() bool { return !i.detached() })
			_, err := io.CopyN(io.Discard, i, int64(want))
			require.NoError(t, err)
			i.parks(t)
			i.ping(t)
		},
		"is taken over": func(t *testing.T, s *server, i *idler) {
			idle(t, s, "idle", 0)
			i.ends(t, packet.SessionTakenOver)
		},
		"is there when the broker ends": func(t *testing.T, s *server, i *idler) {
			require.NoError(t, s.Close(context.Background()))
			i.ends(t, packet.ShuttingDown)
		},
		"has reached its keep alive": func(t *testing.T, s *server, _ *idler) {
			idle(t, s, "short", 1).ends(t, packet.KeepAliveTimeout)
		},
		"is aborted": func(t *testing.T, _ *server, i *idler) {
			i.conn.socket.abort()
			_, err := i.Read(make([]byte, 1))
			require.ErrorContains(t, err, "reset")
		},
		"is closed by the client": func(*testing.T, *server, *idler) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, limit := parker(t)
			i := idle(t, s, "idle", 0)
			require.Equal(t, 1, limit.Stats().Open, "the limit counts it")
			require.Equal(t, i.LocalAddr().String(), i.conn.RemoteAddr().String())
			happens(t, s, i)
			i.Close()
			i.conn.awaitEnd()
			until.Holds(t, "the limit counts no more than the others", func() bool {
				return limit.Stats().Open == s.Stats().Clients
			})
		})
	}
}

func (i *idler) subscribes(t *testing.T, filter string) {
	t.Helper()
	i.send(t, &packet.Subscribe{ID: 1, Filters: []packet.Subscription{{Filter: filter}}})
	require.Equal(t, packet.SUBACK, i.read(t))
	i.parks(t)
}

// TestParkedConnectionsLoseNoDescriptor parks and wakes thousands of times, and ends the connections in different ways.
func TestParkedConnectionsLoseNoDescriptor(t *testing.T) {
	s, limit := parker(t)
	idle(t, s, "first", 0).Close()
	descriptors := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(all)
	}
	until.Holds(t, "the first client is gone", func() bool { return limit.Stats().Open == 0 })
	before := descriptors()
	for range 40 {
		var all []*idler
		for n := range 50 {
			all = append(all, dialIdle(t, s, fmt.Sprint(n), 0))
		}
		for _, i := range all {
			i.parks(t)
		}
		for _, i := range all {
			i.ping(t)
			i.ping(t)
		}
		for n, i := range all {
			i.parks(t)
			switch n % 4 {
			case 0:
				i.Close()
			case 1:
				i.conn.end(packet.SessionTakenOver)
			case 2:
				i.ping(t)
				i.Close()
			case 3:
				i.send(t, &packet.End{Type: packet.DISCONNECT})
			}
		}
		for _, i := range all {
			i.Close()
			i.conn.awaitEnd()
		}
	}
	until.Holds(t, "no descriptor is lost", func() bool { return descriptors() <= before })
	assert.Zero(t, limit.Stats().Open)
}

// TestRefusedReaderIsPatient: the reader of a connection that cannot be parked, because a write to a client that reads nothing
// waits, does not try again every few milliseconds.
func TestRefusedReaderIsPatient(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer client.Close()
	accepted, err := l.Accept()
	require.NoError(t, err)
	defer accepted.Close()
	c := newConn(accepted, &server{})
	for _, refused := range []bool{true, false} {
		c.in.refused = refused
		before := time.Now()
		require.ErrorIs(t, c.in.wait(0), errSilent)
		assert.Equal(t, refused, c.socket.readEnds.Sub(before) >= parkingCheck, "the deadline of a reader that was refused: %v", refused)
	}
}
