package broker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/edge/packet"
	"github.com/tripod-run/tripod/test/until"
)

// hang is the time after which a step of FuzzSession counts as hanging. The fuzzer itself gives up after ten seconds.
const hang = 8 * time.Second

// alarms counts what a broker logs as an error, such as a panic.
type alarms struct {
	slog.Handler
	count atomic.Int64
}

func (a *alarms) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelError }

func (a *alarms) Handle(ctx context.Context, r slog.Record) error {
	a.count.Add(1)
	return a.Handler.Handle(ctx, r)
}

func (a *alarms) WithAttrs([]slog.Attr) slog.Handler { return a }

// attach serves one end of a socket pair as a client's connection, and returns the other one. ended is closed after the
// connection's goroutines have ended and the broker has forgotten it.
func attach(t testing.TB, s *server) (client *net.UnixConn, ended <-chan struct{}) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "client")
		ends[i], err = net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	c := newConn(ends[0], s)
	s.mu.Lock()
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() { // without t: it can outlive the test
		c.awaitEnd()
		err := until.Poll(hang, func() error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if _, there := s.conns[c]; there {
				return errors.New("the broker knows the connection")
			}
			return nil
		})
		if err == nil {
			close(done)
		}
	}()
	s.serving.Add(1)
	go s.serve(c)
	return ends[1].(*net.UnixConn), done
}

// FuzzSession: no bytes from a client make the broker panic, hang, leak goroutines or fail another client. With the level
// 3, 4 or 5 a CONNECT comes first.
func FuzzSession(f *testing.F) {
	encode := func(level byte, all ...packet.Packet) (b []byte) {
		for _, p := range all {
			b = packet.Append(b, p, level)
		}
		return b
	}
	for _, level := range []byte{3, 4, 5} {
		f.Add(level, encode(level,
			&packet.Subscribe{ID: 1, Filters: []packet.Subscription{{Filter: "a/#", QoS: 2}, {Filter: "$share/g/+/b", QoS: 1}}},
			&packet.Publish{Topic: "a/b", QoS: 2, ID: 1, Payload: []byte("x"), Retain: true}, &packet.Publish{Topic: "a", QoS: 1, ID: 2},
			&packet.Ack{Type: packet.PUBREL, ID: 1}, &packet.Ack{Type: packet.PUBREC, ID: 1}, &packet.Ack{Type: packet.PUBACK, ID: 1},
			&packet.Ack{Type: packet.PUBCOMP, ID: 1}, &packet.Ping{Type: packet.PINGREQ},
			&packet.Unsubscribe{ID: 3, Filters: []string{"a/#"}}, &packet.End{Type: packet.DISCONNECT}))
		connect := packet.Connect{Level: level, ClientID: "c", KeepAlive: 1, Will: &packet.Will{Topic: "a/will", QoS: 1, Retain: true}}
		f.Add(byte(0), encode(level, &connect, &packet.Publish{Topic: "a", QoS: 2, ID: 1}, &connect))
	}
	f.Add(byte(5), []byte("\x30\xff\xff\xff\x7f"))

	log := &alarms{Handler: slog.NewTextHandler(os.Stderr, nil)}
	b, err := New(Config{
		Address: "127.0.0.1:0", Path: filepath.Join(f.TempDir(), "broker.db"), Log: slog.New(log), SessionExpiry: time.Second,
		MaxPacket: 64 << 10, MaxQueued: 10, MaxRetained: 10, MaxClients: 10, WriteTimeout: time.Second,
	})
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, b.Close(context.Background())) })
	s := b.(*server)
	topic := rand.Text()
	bystander, _ := attach(f, s)
	f.Cleanup(func() { bystander.Close() })
	_, err = bystander.Write(encode(4, &packet.Connect{Level: 4, ClientID: topic, CleanStart: true},
		&packet.Subscribe{ID: 1, Filters: []packet.Subscription{{Filter: topic}}}))
	require.NoError(f, err)
	_, err = io.ReadFull(bystander, make([]byte, 4+5)) // CONNACK and SUBACK
	require.NoError(f, err)
	turn, fewest := 0, math.MaxInt

	f.Fuzz(func(t *testing.T, level byte, data []byte) {
		fewest = min(fewest, runtime.NumGoroutine())
		client, ended := attach(t, s)
		defer client.Close()
		require.NoError(t, client.SetDeadline(time.Now().Add(hang)))
		read := make(chan error, 1)
		go func() {
			_, err := io.Copy(io.Discard, client)
			read <- err
		}()
		if level >= 3 && level <= 5 {
			data = append(encode(level, &packet.Connect{Level: level, ClientID: "fuzz", CleanStart: len(data)%2 == 0}), data...)
		}
		_, _ = client.Write(data) // fails if the broker has closed the connection
		_ = client.CloseWrite()
		if err := <-read; err != nil && !strings.Contains(err.Error(), "reset") {
			t.Fatalf("the connection does not end: %v", err)
		}
		select {
		case <-ended:
		case <-time.After(hang):
			t.Fatal("the connection's goroutines do not end")
		}
		turn++
		own := encode(4, &packet.Publish{Topic: topic, Payload: fmt.Appendf(nil, "%08d", turn)})
		require.NoError(t, bystander.SetDeadline(time.Now().Add(hang)))
		_, err := bystander.Write(own)
		require.NoError(t, err)
		got := make([]byte, len(own))
		_, err = io.ReadFull(bystander, got)
		require.NoError(t, err, "another client gets its messages")
		require.Equal(t, own, got)
		until.Within(t, hang, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= fewest })
		require.Zero(t, log.count.Load(), "errors in the log")
	})
}
