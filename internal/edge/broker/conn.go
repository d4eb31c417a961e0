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

// takeOverTimeout is how long a client that does not read may keep another connection from its session, and how long the last
// bytes of a closed connection are tried.
const takeOverTimeout = time.Second

// room is how many bytes may be pending on a connection before what writes to it waits.
const room = 64 << 10

// conn is one client's connection. mochi writes to it with a lock held that every publisher to the client needs, so Write never
// waits for the network: what is written is pending until drain has sent it. Whoever writes much calls wait, without that lock.
//
//	mochi's WriteLoop ─ wait ─┐
//	the connection's reader ──┼─ Write ─▶ pending ─ drain ─▶ client
//	resume ──────────── wait ─┘             ▲
//	                           buf ─ release┘   (an acknowledgement, until its message is stored: mochi writes it first)
type conn struct {
	net.Conn
	timeout time.Duration
	gate    atomic.Pointer[gate] // from the session's start
	unlock  func()               // what the connection's own goroutine holds of hooks.passing
	gone    chan struct{}        // closed when nothing is written any more

	mu       sync.Mutex
	changed  *sync.Cond // there is more room, or none is needed
	pending  []byte
	writing  int       // bytes that drain writes now
	draining bool      // to the end once closed is set
	by       time.Time // when writes end at the latest; zero: each has its timeout
	closed   bool
	held     bool
	buf      []byte
}

func newConn(c net.Conn, timeout time.Duration) *conn {
	n := &conn{Conn: c, timeout: timeout, gone: make(chan struct{})}
	n.changed = sync.NewCond(&n.mu)
	return n
}

// Write implements net.Conn: it takes all of p, and fails only when the connection is closed.
func (c *conn) Write(p []byte) (int, error) {
	if g := c.gate.Load(); g != nil && g.take(p) {
		return len(p), nil
	}
	return c.pass(p)
}

func (c *conn) pass(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return 0, net.ErrClosed
	case c.held:
		c.buf = append(c.buf, p...)
	default:
		c.pending = append(c.pending, p...)
		c.drainSoon()
	}
	return len(p), nil
}

// wait returns when there is room to write, or the connection is closed.
func (c *conn) wait() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.closed && c.writing+len(c.pending)+len(c.buf) > room {
		c.changed.Wait()
	}
}

func (c *conn) drainSoon() {
	if !c.draining {
		c.draining = true
		go c.drain()
	}
}

// drain writes what is pending, bounds the time of a client that does not read, and ends a connection that is closed.
func (c *conn) drain() {
	var spare []byte
	c.mu.Lock()
	for len(c.pending) > 0 {
		p := c.pending
		c.pending, c.writing = spare, len(p)
		deadline := time.Now().Add(c.timeout)
		if !c.by.IsZero() && c.by.Before(deadline) {
			deadline = c.by
		}
		err := c.SetWriteDeadline(deadline)
		c.mu.Unlock()
		if err == nil {
			_, err = c.Conn.Write(p)
		}
		if spare = nil; cap(p) <= room {
			spare = p[:0]
		}
		c.mu.Lock()
		c.writing = 0
		if err != nil {
			c.closed, c.pending = true, nil // what follows would be taken for the rest of this packet
			if t, ok := c.Conn.(*tls.Conn); ok {
				t.NetConn().Close() // without the alert, for which there is no room
			}
		}
		c.changed.Broadcast()
	}
	last := c.closed
	c.draining = last
	c.mu.Unlock()
	if last {
		c.Conn.Close()
		close(c.gone)
	}
}

// SetDeadline implements net.Conn, for reading only: mochi sets both by the client's keep-alive, which may be none.
func (c *conn) SetDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	return c.SetReadDeadline(t)
}

// hurry ends writes soon.
func (c *conn) hurry() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hasten()
}

func (c *conn) hasten() {
	if c.by.IsZero() {
		c.by = time.Now().Add(takeOverTimeout)
		_ = c.SetWriteDeadline(c.by) // a closed connection needs none
	}
}

// Close implements net.Conn. It does not wait: nothing is read any more, and what is pending is written within
// takeOverTimeout.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	c.hasten()
	_ = c.SetReadDeadline(time.Unix(1, 0)) // fails when the client has gone
	c.changed.Broadcast()
	c.drainSoon()
	return nil
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
	if len(c.buf) > 0 && !c.closed {
		c.pending = append(c.pending, c.buf...)
		c.drainSoon()
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
	end            func()          // disconnects the clients
	abandon        func(*conn)     // ends what mochi has left of a client
	clients        *sync.WaitGroup // mochi's, which counts a connection only when its own goroutine runs
	closed         chan struct{}
	served         chan struct{} // closed when no connection is taken any more
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
	defer close(l.served)
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			l.clients.Go(func() { l.serve(establish, newConn(c, l.timeout)) })
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
	_ = c.Conn.SetDeadline(time.Now().Add(l.connectTimeout)) // for the TLS handshake, too
	if err := establish(l.id, c); err != nil {
		l.log.Debug("broker: client gone", "remote", c.RemoteAddr().String(), "err", err)
	}
}

// Close implements listeners.Listener. mochi's own way to its clients takes a read lock twice, and hangs when one ends in between.
func (l *listener) Close(listeners.CloseFn) {
	l.once.Do(func() {
		close(l.closed)
		l.Listener.Close()
		<-l.served
		l.end()
	})
}
