package broker

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mochi-mqtt/server/v2/listeners"

	"github.com/tripod-run/tripod/internal/guard"
)

// takeOverTimeout is how long a client that does not read may keep another connection from its session.
const takeOverTimeout = time.Second

// conn is one client's connection; mochi writes one packet at a time. It can hold back what is written to it, so an
// acknowledgement does not leave before the message is stored: mochi writes it first.
type conn struct {
	net.Conn
	timeout time.Duration
	gate    atomic.Pointer[gate] // from the session's start
	hurried atomic.Bool          // another connection takes the session over
	unlock  func()               // what the connection's own goroutine holds of hooks.passing

	mu   sync.Mutex
	held bool
	buf  []byte
}

// Write bounds the time of a client that does not read.
func (c *conn) Write(p []byte) (int, error) {
	if g := c.gate.Load(); g != nil && g.take(p) {
		return len(p), nil
	}
	return c.pass(p)
}

func (c *conn) pass(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held {
		c.buf = append(c.buf, p...)
		return len(p), nil
	}
	return c.write(p)
}

func (c *conn) write(p []byte) (int, error) {
	timeout := c.timeout
	if c.hurried.Load() {
		timeout = min(timeout, takeOverTimeout)
	}
	if err := c.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return 0, err
	}
	n, err := c.Conn.Write(p)
	if err != nil {
		c.Close() // what follows would be taken for the rest of this packet
	}
	return n, err
}

// hurry ends writes soon.
func (c *conn) hurry() {
	c.hurried.Store(true)
	_ = c.SetWriteDeadline(time.Now().Add(takeOverTimeout)) // a closed connection needs none
}

// unlocked gives back what the connection's goroutine holds.
func (c *conn) unlocked() {
	if c.unlock != nil {
		c.unlock()
		c.unlock = nil
	}
}

func (c *conn) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = true
}

func (c *conn) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = false
	if len(c.buf) > 0 {
		_, _ = c.write(c.buf) // an error has closed the connection, which its reader sees
	}
	c.buf = nil
}

// commonName is that of the certificate that the client has shown and the listener has checked.
func (c *conn) commonName() string {
	t, ok := c.Conn.(*tls.Conn)
	if !ok {
		return ""
	}
	chains := t.ConnectionState().VerifiedChains
	if len(chains) == 0 {
		return ""
	}
	return chains[0][0].Subject.CommonName
}

// listener is mochi's door. mochi's own stops listening at the first error of Accept; here one that passes is waited out. And a
// packet that makes mochi panic (2.7.9: a SUBSCRIBE that ends behind a filter) ends that client's connection only.
type listener struct {
	net.Listener
	id      string
	timeout time.Duration
	// connectTimeout is how long a connection may stand before its CONNECT has come.
	connectTimeout time.Duration
	log            *slog.Logger
	end            func()      // disconnects the clients
	abandon        func(*conn) // ends what mochi has left of a client
	closed         chan struct{}
	once           sync.Once
}

// Init implements listeners.Listener; the address is open already.
func (l *listener) Init(*slog.Logger) error { return nil }

// ID implements listeners.Listener.
func (l *listener) ID() string { return l.id }

// Protocol implements listeners.Listener.
func (l *listener) Protocol() string { return l.id }

// Address implements listeners.Listener.
func (l *listener) Address() string { return l.Addr().String() }

// Serve implements listeners.Listener.
func (l *listener) Serve(establish listeners.EstablishFn) {
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			go l.serve(establish, &conn{Conn: c, timeout: l.timeout})
		case errors.Is(err, net.ErrClosed):
			return
		default:
			l.log.Error("broker: no connection can be taken", "address", l.Address(), "err", err)
			select {
			case <-time.After(100 * time.Millisecond): // out of file descriptors, say
			case <-l.closed:
				return
			}
		}
	}
}

// serve works one connection to its end.
func (l *listener) serve(establish listeners.EstablishFn, c *conn) {
	defer func() {
		c.Close()
		c.unlocked() // mochi leaves out OnPublished and OnSessionEstablished when a write has failed
		if g := c.gate.Load(); g != nil {
			g.close()
		}
		if p := recover(); p != nil {
			_ = guard.Report(l.log.With("remote", c.RemoteAddr().String()), "MQTT client", p)
			l.abandon(c)
		}
	}()
	// A fresh connection: an error would show at its first read.
	_ = c.SetDeadline(time.Now().Add(l.connectTimeout))
	if err := establish(l.id, c); err != nil {
		l.log.Debug("broker: client gone", "remote", c.RemoteAddr().String(), "err", err)
	}
}

// Close implements listeners.Listener. mochi's own way to its clients takes a read lock twice, and hangs when one ends in between.
func (l *listener) Close(listeners.CloseFn) {
	l.once.Do(func() {
		close(l.closed)
		l.Listener.Close()
		l.end()
	})
}
