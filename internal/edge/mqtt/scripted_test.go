package mqtt_test

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

const patience = 60 * time.Second

func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// scripted is a broker that passes every connection to the script.
func scripted(t *testing.T, script func(n int, c net.Conn)) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			go script(n, c)
		}
	}()
	return "mqtt://" + l.Addr().String()
}

// expect reads packets of less than 128 bytes until one begins with the byte.
func expect(c net.Conn, first byte) []byte {
	for {
		head := make([]byte, 2)
		if _, err := io.ReadFull(c, head); err != nil {
			return nil
		}
		body := make([]byte, head[1])
		if _, err := io.ReadFull(c, body); err != nil {
			return nil
		}
		if head[0] == first {
			return body
		}
	}
}

func start(t *testing.T, cfg mqtt.Config) mqtt.Client {
	cfg.BackoffMin, cfg.BackoffMax = 10*time.Millisecond, 50*time.Millisecond
	c, err := mqtt.New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close(patient(t)) })
	return c
}

const connack, resumed = "\x20\x02\x00\x00", "\x20\x02\x01\x00"

// TestBadBrokers: whatever a broker does, the client survives and reconnects until the broker behaves.
func TestBadBrokers(t *testing.T) {
	bad := map[string]string{
		"nothing":            "",
		"no connack":         "\xd0\x00",
		"refused":            "\x20\x02\x00\x05",
		"refused, no reason": "\x20\x02\x00\x63",
		"short connack":      "\x20\x01\x00",
		"http":               "HTTP/1.1 400 Bad Request\r\n\r\n",
		"flags":              "\x2f\x02\x00\x00",
		"endless length":     "\x20\xff\xff\xff\xff\xff",
		"too large":          connack + "\x30\xff\xff\xff\x7f",
		"truncated":          connack + "\x30\x10\x00\x01a",
		"topic too long":     connack + "\x30\x03\x00\x09a",
		"no packet id":       connack + "\x32\x03\x00\x01a",
		"qos 3":              connack + "\x36\x05\x00\x01a\x00\x01",
		"short puback":       connack + "\x40\x01\x00",
		"short suback":       connack + "\x90\x01\x00",
		"a connect":          connack + "\x10\x00",
		"unknown":            connack + "\x00\x00",
		"answers unasked":    connack + "\x40\x02\x00\x07\x70\x02\x00\x07\x90\x03\x00\x07\x00\xb0\x02\x00\x07",
	}
	for name, bytes := range bad {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := scripted(t, func(n int, c net.Conn) {
				expect(c, 0x10)
				if n < 3 {
					io.WriteString(c, bytes)
				} else {
					io.WriteString(c, connack)
					expect(c, 0xe0)
				}
				c.Close()
			})
			var lost atomic.Int32
			c := start(t, mqtt.Config{URL: url, Protocol: 4, OnDisconnect: func(error) { lost.Add(1) }})
			require.Eventually(t, func() bool {
				// There were four connections, and the last one is still up.
				s := c.Stats()
				return c.Connected() && int(s.Connects)-int(lost.Load()) == 1 && (s.Connects == 4 || s.Connects == 1)
			}, patience, time.Millisecond)
		})
	}
}

// TestExactlyOnce: a message with QoS 2 that the broker sends again, on the same connection or the next, reaches the
// Handler once and is acknowledged each time.
func TestExactlyOnce(t *testing.T) {
	const message = "\x34\x06\x00\x01t\x00\x05m"
	const again = "\x3c\x06\x00\x01t\x00\x05m"
	done := make(chan bool, 1)
	url := scripted(t, func(n int, c net.Conn) {
		expect(c, 0x10)
		switch n {
		case 0:
			io.WriteString(c, connack+message+again)
			expect(c, 0x50)
			c.Close()
		case 1:
			io.WriteString(c, resumed+again)
			expect(c, 0x50)
			io.WriteString(c, "\x62\x02\x00\x05")
			expect(c, 0x70)
			for range 2 { // the identifier is free, so this is a new message; then the broker has forgotten it
				io.WriteString(c, message)
				expect(c, 0x50)
			}
			io.WriteString(c, "\x62\x02\x00\x05")
			expect(c, 0x70)
			io.WriteString(c, "\x62\x02\x00\x05") // again: the client answers that it does not know the identifier
			done <- expect(c, 0x70) != nil
			expect(c, 0xe0)
			c.Close()
		}
	})
	var handled atomic.Int32
	c := start(t, mqtt.Config{URL: url, Protocol: 4, ClientID: "n", SessionExpiry: time.Hour, Handler: func(mqtt.Message) { handled.Add(1) }})
	assert.True(t, <-done)
	assert.Equal(t, int32(3), handled.Load())
	require.NoError(t, c.Close(patient(t)))
}

// TestResend: messages in flight are sent again: with the same identifiers and DUP, or continuing from PUBREL, to a
// broker that has kept the session; as new messages to a broker that has lost it.
func TestResend(t *testing.T) {
	type seen struct {
		first byte
		body  string
	}
	packets := make(chan seen, 10)
	next := func(c net.Conn, first byte) uint16 {
		b := expect(c, first)
		if b == nil {
			return 0
		}
		packets <- seen{first, string(b[3:4])}
		return uint16(b[4])<<8 | uint16(b[5])
	}
	same := make(chan bool, 3)
	published := make(chan struct{})
	url := scripted(t, func(n int, c net.Conn) {
		defer c.Close()
		expect(c, 0x10)
		switch n {
		case 0:
			io.WriteString(c, connack)
			<-published
			a, b := next(c, 0x32), next(c, 0x34)
			c.Write([]byte{0x50, 2, byte(b >> 8), byte(b)})
			expect(c, 0x62)
			go func() { same <- a != 0 && b != 0 && a != b }()
		case 1:
			io.WriteString(c, resumed)
			next(c, 0x3a)
			same <- expect(c, 0x62) != nil
		case 2:
			io.WriteString(c, connack)
			a := next(c, 0x32)
			c.Write([]byte{0x40, 2, byte(a >> 8), byte(a)})
			expect(c, 0xe0)
		}
	})
	c := start(t, mqtt.Config{URL: url, Protocol: 4, ClientID: "n", SessionExpiry: time.Hour})
	require.NoError(t, c.Publish(patient(t), "/a", 1, false, nil))
	require.NoError(t, c.Publish(patient(t), "/b", 2, false, nil))
	close(published)
	require.Eventually(t, func() bool { return c.Stats().Queued == 0 }, patience, time.Millisecond)
	assert.Equal(t, []seen{{0x32, "a"}, {0x34, "b"}, {0x3a, "a"}, {0x32, "a"}}, []seen{<-packets, <-packets, <-packets, <-packets})
	assert.True(t, <-same)
	assert.True(t, <-same)
	assert.Equal(t, uint64(2), c.Stats().Published)
	require.NoError(t, c.Close(patient(t)))
}

// TestSilence: the client disconnects from a broker that sends nothing, or reads nothing.
func TestSilence(t *testing.T) {
	for name, cfg := range map[string]mqtt.Config{
		"silent":  {KeepAlive: 200 * time.Millisecond},
		"no read": {KeepAlive: time.Hour, WriteTimeout: 200 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hold := make(chan struct{})
			t.Cleanup(func() { close(hold) })
			cfg.Protocol = 4
			cfg.URL = scripted(t, func(n int, c net.Conn) {
				expect(c, 0x10)
				io.WriteString(c, connack)
				if n == 0 {
					<-hold
				}
				expect(c, 0xe0)
				c.Close()
			})
			lost := make(chan error, 1)
			cfg.OnDisconnect = func(err error) {
				select {
				case lost <- err:
				default:
				}
			}
			c := start(t, cfg)
			require.NoError(t, c.WaitConnected(patient(t)))
			for cfg.WriteTimeout > 0 && len(lost) == 0 {
				c.Publish(patient(t), "t", 0, false, make([]byte, 1<<20))
			}
			require.Error(t, <-lost)
			require.NoError(t, c.WaitConnected(patient(t)))
		})
	}
}

// TestRefused: WaitConnected returns the broker's reason.
func TestRefused(t *testing.T) {
	url := scripted(t, func(_ int, c net.Conn) {
		expect(c, 0x10)
		io.WriteString(c, "\x20\x02\x00\x04")
		c.Close()
	})
	c := start(t, mqtt.Config{URL: url, Protocol: 4, Username: "me"})
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	err := c.WaitConnected(ctx)
	assert.ErrorIs(t, err, errdefs.ErrPermissionDenied)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "bad user name or password")
	require.NoError(t, c.Close(patient(t)))
	assert.ErrorIs(t, c.WaitConnected(patient(t)), errdefs.ErrFailedPrecondition)
	for _, err := range []error{c.Publish(patient(t), "t", 0, false, nil), c.Publish(patient(t), "t", 1, false, nil),
		c.Subscribe(patient(t), "t", 0, mqtt.SubscribeOptions{})} {
		assert.ErrorIs(t, err, errdefs.ErrFailedPrecondition)
	}
	assert.NoError(t, c.Close(patient(t)), "twice")
}
