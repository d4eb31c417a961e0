package broker

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mochi-mqtt/server/v2/listeners"
	"github.com/mochi-mqtt/server/v2/packets"

	"github.com/tripod-run/tripod/internal/guard"
)

// takeOverTimeout bounds the writes to a connection that is being closed, or whose session another connection takes
// over.
const takeOverTimeout = time.Second

// maxPending is the number of bytes that may be pending on a connection before its method wait blocks.
const maxPending = 64 << 10

// conn is one client's connection. While mochi writes to it, mochi holds a lock that every publisher to the client
// needs. So Write never waits for the network: it appends to pending, which drain sends. Callers that write a lot call
// wait first, without holding that lock.
//
//	mochi's WriteLoop ─ wait ─┐
//	the connection's reader ──┼─ Write ─▶ pending ─ drain ─▶ client
//	resume ──────────── wait ─┘   │         ▲
//	                   acknowledgements     │
//	                              ▼         │
//	               held ─ release ─▶ later ─┘   once what they acknowledge is on the disk
type conn struct {
	net.Conn
	store          *store
	timeout        time.Duration
	gate           atomic.Pointer[gate] // nil before the session starts
	unlockDelivery func()               // unlocks hooks.delivery; nil unless the connection's goroutine holds that lock
	ended          chan struct{}        // closed after the last write

	mu            sync.Mutex
	changed       *sync.Cond // signals that pending is shorter, or that the connection is closed
	pending       []byte
	writing       int       // bytes that drain is writing
	draining      bool      // drain runs; never reset once closed is set
	finalDeadline time.Time // for all writes together; if zero, each write has its own deadline
	closed        bool
	holding       bool     // acknowledgements are appended to held
	held          []byte   // by hold, because mochi acknowledges a message before it passes the message on
	later         []answer // acknowledgements that wait for the disk, in order

	request  uint16 // the identifier that the client gave the packet that is being processed; for the reader only
	released bool   // the packet is the PUBREL of a received message; for the reader only
}

// answer is one or more encoded acknowledgements.
type answer struct {
	packets []byte
	batch   uint64 // they leave once the store has written this batch
}

func newConn(c net.Conn, st *store, timeout time.Duration) *conn {
	n := &conn{Conn: c, store: st, timeout: timeout, ended: make(chan struct{})}
	n.changed = sync.NewCond(&n.mu)
	return n
}

// Write implements net.Conn. It accepts all of p, and fails only if the connection is closed.
func (c *conn) Write(p []byte) (int, error) {
	if g := c.gate.Load(); g != nil && g.take(p) {
		return len(p), nil
	}
	switch p[0] >> 4 {
	case packets.Puback, packets.Pubrec, packets.Pubrel, packets.Pubcomp, packets.Unsuback:
		return c.acknowledge(p)
	}
	return c.pass(p)
}

func (c *conn) pass(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, net.ErrClosed
	}
	c.pending = append(c.pending, p...)
	c.drainSoon()
	return len(p), nil
}

// acknowledge sends p once the urgent changes to the store are on the disk.
func (c *conn) acknowledge(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return 0, net.ErrClosed
	case c.holding:
		c.held = append(c.held, p...)
	default:
		c.acknowledgeLocked(slices.Clone(p))
	}
	return len(p), nil
}

func (c *conn) acknowledgeLocked(p []byte) {
	batch := c.store.needed()
	switch last := len(c.later) - 1; {
	case batch == 0 && last < 0:
		c.pending = append(c.pending, p...)
		c.drainSoon()
	case last >= 0 && c.later[last].batch >= batch:
		c.later[last].packets = append(c.later[last].packets, p...)
	default:
		c.later = append(c.later, answer{p, batch})
		if last < 0 {
			go c.sendLater()
		}
	}
}

// sendLater sends the acknowledgements in later, each once its batch is on the disk.
func (c *conn) sendLater() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.later) > 0 {
		batch := c.later[0].batch
		c.mu.Unlock()
		c.store.waitFor(batch)
		c.mu.Lock()
		if c.closed {
			c.later = nil
			return
		}
		c.pending = append(c.pending, c.later[0].packets...)
		c.later = c.later[1:]
		c.drainSoon()
	}
}

// wait waits until at most maxPending bytes are pending, or the connection is closed.
func (c *conn) wait() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.closed && c.unsent() > maxPending {
		c.changed.Wait()
	}
}

func (c *conn) unsent() int {
	n := c.writing + len(c.pending) + len(c.held)
	for _, a := range c.later {
		n += len(a.packets)
	}
	return n
}

func (c *conn) drainSoon() {
	if !c.draining {
		c.draining = true
		go c.drain()
	}
}

// drain writes the pending bytes. Each write has a deadline, in case the client does not read. If Close was called,
// drain closes the connection after the last write.
func (c *conn) drain() {
	var reuse []byte
	c.mu.Lock()
	for len(c.pending) > 0 {
		p := c.pending
		c.pending, c.writing = reuse, len(p)
		deadline := time.Now().Add(c.timeout)
		if !c.finalDeadline.IsZero() && c.finalDeadline.Before(deadline) {
			deadline = c.finalDeadline
		}
		err := c.SetWriteDeadline(deadline)
		c.mu.Unlock()
		if err == nil {
			_, err = c.Conn.Write(p)
		}
		if reuse = nil; cap(p) <= maxPending {
			reuse = p[:0]
		}
		c.mu.Lock()
		c.writing = 0
		if err != nil {
			c.closed, c.pending = true, nil // the packet may be incomplete, so the client would take further bytes for its rest
			if t, ok := c.Conn.(*tls.Conn); ok {
				t.NetConn().Close() // without TLS's alert, which could not be written either
			}
		}
		c.changed.Broadcast()
	}
	last := c.closed
	c.draining = last
	c.mu.Unlock()
	if last {
		c.Conn.Close()
		close(c.ended)
	}
}

// SetDeadline implements net.Conn, but sets only the deadline for reading, because mochi derives both deadlines from
// the client's keep-alive, which can be 0. Writes have their own limit.
func (c *conn) SetDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	return c.SetReadDeadline(t)
}

// limitWrites makes all writes end within takeOverTimeout.
func (c *conn) limitWrites() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.limitWritesLocked()
}

func (c *conn) limitWritesLocked() {
	if c.finalDeadline.IsZero() {
		c.finalDeadline = time.Now().Add(takeOverTimeout)
		_ = c.SetWriteDeadline(c.finalDeadline) // fails only if the connection is closed
	}
}

// Close implements net.Conn. It does not wait: reads end, and the pending bytes are written in the background within
// takeOverTimeout.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	c.limitWritesLocked()
	_ = c.SetReadDeadline(time.Unix(1, 0)) // fails if the client has disconnected
	c.changed.Broadcast()
	c.drainSoon()
	return nil
}

// endDelivery unlocks hooks.delivery, if the connection's goroutine holds it.
func (c *conn) endDelivery() {
	if c.unlockDelivery != nil {
		c.unlockDelivery()
		c.unlockDelivery = nil
	}
}

// hold keeps acknowledgements until release.
func (c *conn) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holding = true
}

func (c *conn) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holding = false
	if len(c.held) > 0 && !c.closed {
		c.acknowledgeLocked(c.held)
	}
	c.held = nil
}

// commonName returns the common name in the client's verified certificate, or "".
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

// listener replaces mochi's own listener, which stops at the first error from Accept. This listener continues to accept
// connections after a temporary error. If a packet makes mochi panic, only that client's connection ends. (mochi 2.7.9
// panics on a SUBSCRIBE that ends right after a filter.)
type listener struct {
	net.Listener
	id      string
	store   *store
	timeout time.Duration
	// connectTimeout bounds the time from a connection's start to its CONNECT.
	connectTimeout time.Duration
	log            *slog.Logger
	end            func()          // disconnects the clients
	abandon        func(*conn)     // ends the session that a panic of mochi left behind
	clients        *sync.WaitGroup // mochi's own; Serve adds each connection early, because mochi adds a connection only once its goroutine runs
	closed         chan struct{}
	served         chan struct{} // closed when Serve returns
	once           sync.Once
}

// Init implements listeners.Listener. The listener is already listening.
func (l *listener) Init(*slog.Logger) error { return nil }

func (l *listener) ID() string { return l.id }

func (l *listener) Protocol() string { return l.id }

func (l *listener) Address() string { return l.Addr().String() }

func (l *listener) Serve(establish listeners.EstablishFn) {
	defer close(l.served)
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			l.clients.Go(func() { l.serve(establish, newConn(c, l.store, l.timeout)) })
		case errors.Is(err, net.ErrClosed):
			return
		default:
			l.log.Error("broker: cannot accept connections", "address", l.Address(), "err", err)
			select {
			case <-time.After(100 * time.Millisecond): // for example, out of file descriptors
			case <-l.closed:
				return
			}
		}
	}
}

// serve serves one connection until it closes.
func (l *listener) serve(establish listeners.EstablishFn, c *conn) {
	defer func() {
		c.Close()
		c.endDelivery() // mochi does not call OnPublished and OnSessionEstablished if a write has failed
		if g := c.gate.Load(); g != nil {
			g.close()
		}
		if p := recover(); p != nil {
			_ = guard.Report(l.log.With("remote", c.RemoteAddr().String()), "MQTT client", p)
			l.abandon(c)
		}
	}()
	_ = c.Conn.SetDeadline(time.Now().Add(l.connectTimeout)) // also for the TLS handshake; the first read reports an error
	if err := establish(l.id, c); err != nil {
		l.log.Debug("broker: client disconnected", "remote", c.RemoteAddr().String(), "err", err)
	}
}

// Close implements listeners.Listener. It ignores mochi's CloseFn, which can deadlock: CloseFn takes a read lock twice,
// and hangs if a client ends in between.
func (l *listener) Close(listeners.CloseFn) {
	l.once.Do(func() {
		close(l.closed)
		l.Listener.Close()
		<-l.served
		l.end()
	})
}
