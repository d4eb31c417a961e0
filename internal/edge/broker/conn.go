package broker

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/packet"
)

const (
	// takeOverTimeout bounds the writes to a connection that is being closed, or whose session another connection takes
	// over.
	takeOverTimeout = time.Second
	// lingerTimeout and lingerBytes bound what the broker still reads after the packet that says why a connection ends.
	lingerTimeout = 500 * time.Millisecond
	lingerBytes   = 1 << 20
	// maxPending is the number of bytes of answers that may be pending before the connection's next packet is read.
	maxPending = 64 << 10
	// pongPatience is how long a PINGRESP waits for the answers before it.
	pongPatience = time.Second
	// maxWrite is about the number of bytes that one write has.
	maxWrite = 64 << 10
)

var writeBuffers = sync.Pool{New: func() any { b := make([]byte, 0, maxWrite+4096); return &b }}

// conn is a client's connection. Its own goroutine reads and handles one packet after the other. Whatever is to be sent
// is taken by drain, a second goroutine that exists only while there is something to send: first the answers to the
// client's packets, then the session's messages.
//
//	handle ─ answer ─▶ answers ──once what they acknowledge is on the disk──┐
//	                                                                        ├─ drain ─▶ client
//	other clients' publish ─▶ session.enqueue ─ kick ─▶ session.collect ────┘
type conn struct {
	transport
	socket *socket         // the transport, or nil if it is another one
	entry  *connlimit.Conn // nil in tests
	server *server
	in     reader

	// These are set by CONNECT.
	level      byte
	bridge     bool
	id, user   string
	window     uint16        // the client's receive maximum
	aliasLimit uint16        // outgoing topic aliases
	maxPacket  uint32        // of the client
	keepAlive  time.Duration // 0: none
	session    *session
	will       *will
	expires    time.Duration // Session Expiry Interval of CONNECT

	ticket uint64 // guarded by parking.mu

	aliases  map[uint16]string // of incoming messages
	outgoing map[string]uint16 // aliases of outgoing messages; guarded by session.mu

	mu        sync.Mutex
	changed   *sync.Cond // pending, closing or ended changed; nil while nobody waits for that
	answers   fifo[answer]
	pending   int  // bytes of answers and of the current write
	open      bool // CONNACK was sent
	draining  bool // there is a drain, or there must not be another one
	kicked    bool
	waiting   bool // a goroutine waits for the store
	closing   bool
	busy      bool      // connlimit takes the connection for busy, until it ends
	reason    bool      // the last packet says why the connection ends
	broken    bool      // a write failed
	writeEnds time.Time // deadline of all writes, once the connection is closing
	ended     bool      // the transport is closed
	unacked   int32     // messages with QoS 1 and 2 from the client, without the last acknowledgement
}

// transport is what a connection needs of a net.Conn.
type transport interface {
	io.ReadWriteCloser
	RemoteAddr() net.Addr
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// answer holds packets that leave once the store has written a batch.
type answer struct {
	packets []byte
	batch   uint64
	final   int // messages that they acknowledge completely
	// overtakes is set for PINGRESP: from then on, it need not wait for the answers before it. A disk that hangs must not
	// look like a dead connection.
	overtakes time.Time
}

func newConn(c net.Conn, s *server) *conn {
	n := &conn{transport: c, server: s, entry: connlimit.Of(c)}
	n.in.conn = n
	if n.socket = newSocket(c, n); n.socket != nil {
		n.transport = n.socket
		if n.entry != nil {
			n.entry.Closable(n.socket.abort)
		}
	}
	return n
}

// answer sends a packet once the store has written a batch; 0 means that it waits for nothing but the answers before it.
// final is the number of messages from the client whose last acknowledgement the packet is. A packet that is larger than
// the client accepts ends the connection instead (MQTT 5.0 §3.1.2.11.4).
func (c *conn) answer(p packet.Packet, final int, batch uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return
	}
	var last *answer
	if n := c.answers.len(); n > 0 {
		last = &c.answers.all()[n-1]
	}
	if last == nil || last.batch < batch || !last.overtakes.IsZero() {
		c.answers.push(answer{batch: batch})
		last = &c.answers.all()[c.answers.len()-1]
	}
	before := len(last.packets)
	last.packets = packet.Append(last.packets, p, c.level)
	if int64(len(last.packets)-before) > int64(c.maxPacket) && c.maxPacket > 0 {
		last.packets = last.packets[:before]
		c.endLocked(packet.TooLarge)
		return
	}
	last.final += final
	c.pending += len(last.packets) - before
	c.drainSoon()
}

// pong sends PINGRESP.
func (c *conn) pong() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return
	}
	p := packet.Append(nil, &packet.Ping{Type: packet.PINGRESP}, c.level)
	c.answers.push(answer{packets: p, overtakes: time.Now().Add(pongPatience)})
	c.pending += len(p)
	if c.answers.len() > 1 {
		time.AfterFunc(pongPatience, c.kick)
	}
	c.drainSoon()
}

// kick makes drain look at the session.
func (c *conn) kick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drainSoon()
}

func (c *conn) drainSoon() {
	c.kicked = true
	if !c.draining {
		c.draining = true
		go c.drain()
	}
}

// awaitChange waits until announce is called. The lock is held.
func (c *conn) awaitChange() {
	if c.changed == nil {
		c.changed = sync.NewCond(&c.mu)
	}
	c.changed.Wait()
}

func (c *conn) announce() {
	if c.changed != nil {
		c.changed.Broadcast()
	}
}

// settle waits until the client has read most of the answers to it, or the connection is closed.
func (c *conn) settle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.closing && c.pending > maxPending {
		c.awaitChange()
	}
}

// drain sends until nothing is left that may be sent now.
func (c *conn) drain() {
	buffer := writeBuffers.Get().(*[]byte)
	defer writeBuffers.Put(buffer)
	for {
		out, written := c.take((*buffer)[:0])
		if len(out) == 0 {
			c.mu.Lock()
			if c.kicked { // also by end, whose DISCONNECT is among the answers then
				c.mu.Unlock()
				continue
			}
			last := c.closing
			c.draining = last // nothing is sent any more
			c.mu.Unlock()
			if last {
				c.finish()
			}
			return
		}
		err := c.write(out)
		c.mu.Lock()
		c.pending -= written
		if err != nil {
			c.broken, c.closing = true, true
			c.answers, c.pending = fifo[answer]{}, 0
		}
		c.announce()
		c.mu.Unlock()
		if err != nil {
			c.finish()
			return
		}
		if cap(out) <= 2*maxWrite {
			*buffer = out
		}
	}
}

// take returns what is to be written next, and how many bytes of it count as pending.
func (c *conn) take(to []byte) (out []byte, answered int) {
	c.mu.Lock()
	c.kicked = false
	out = to
	var blocked uint64
	for c.answers.len() > 0 {
		next := c.answers.first()
		if !c.server.store.isWritten(next.batch) {
			if !c.closing {
				blocked = next.batch
				out, answered = c.overtaking(out, answered)
				break
			}
			next.packets = nil // what is not on the disk is not acknowledged
		}
		answered += len(next.packets)
		out = append(out, next.packets...)
		c.unacked = max(c.unacked-int32(next.final), 0)
		c.open = true
		c.answers.pop()
	}
	s, open := c.session, c.open && !c.closing
	c.mu.Unlock()
	if s != nil && open && len(out) < maxWrite {
		var batch uint64
		if out, batch = s.collect(c, out, maxWrite); batch > 0 && (blocked == 0 || batch < blocked) {
			blocked = batch
		}
	}
	if blocked > 0 {
		c.await(blocked)
	}
	return out, answered
}

// overtaking appends each PINGRESP that must not wait any longer.
func (c *conn) overtaking(to []byte, answered int) ([]byte, int) {
	now := time.Now()
	for i := range c.answers.all() {
		if a := &c.answers.all()[i]; !a.overtakes.IsZero() && now.After(a.overtakes) {
			to = append(to, a.packets...)
			answered += len(a.packets)
			a.packets = nil
		}
	}
	return to, answered
}

// await kicks the connection once the store has written a batch.
func (c *conn) await(batch uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting {
		return
	}
	c.waiting = true
	go func() {
		c.server.store.waitFor(batch)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.waiting = false
		c.drainSoon()
	}()
}

func (c *conn) write(p []byte) error {
	deadline := time.Now().Add(c.server.cfg.WriteTimeout)
	c.mu.Lock()
	if !c.writeEnds.IsZero() && c.writeEnds.Before(deadline) {
		deadline = c.writeEnds
	}
	err := c.transport.SetWriteDeadline(deadline)
	c.mu.Unlock()
	if err == nil {
		_, err = c.transport.Write(p)
	}
	return err
}

// finish closes the connection after the last write. If that was the reason why the connection ends, it first waits until
// the client has closed its side: a socket that is closed with unread bytes is reset, and the client could lose the reason.
func (c *conn) finish() {
	c.mu.Lock()
	broken, reason := c.broken, c.reason
	if c.busy { // from now on, it makes room for others
		c.entry.End()
	}
	c.mu.Unlock()
	switch half, ok := c.transport.(interface{ CloseWrite() error }); {
	case broken:
		if t := tlsConn(c.transport); t != nil {
			t.NetConn().Close() // without TLS's alert, which could not be written either
		}
	case reason && ok && half.CloseWrite() == nil && c.transport.SetReadDeadline(time.Now().Add(lingerTimeout)) == nil:
		_, _ = io.CopyN(io.Discard, c.transport, lingerBytes) // less if the client ends, or at the deadline
	}
	c.transport.Close()
	c.mu.Lock()
	c.ended = true
	c.announce()
	c.mu.Unlock()
	c.server.parking.wake(c)
}

// awaitEnd waits until finish has closed the connection.
func (c *conn) awaitEnd() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.ended {
		c.awaitChange()
	}
}

// end closes the connection without waiting: reads end, and what is pending is written within takeOverTimeout. With MQTT
// 5.0 the last packet is a DISCONNECT with the given code; 0 means none.
func (c *conn) end(code packet.Code) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(code)
}

func (c *conn) endLocked(code packet.Code) {
	if c.closing {
		return
	}
	if code != 0 && c.open && c.level == 5 { // open first: before, CONNECT may be about to set the level
		c.answers.push(answer{packets: packet.Append(nil, &packet.End{Type: packet.DISCONNECT, Code: code}, c.level)})
		c.reason = true
	}
	c.closing = true
	if c.writeEnds.IsZero() {
		c.writeEnds = time.Now().Add(takeOverTimeout)
		_ = c.transport.SetWriteDeadline(c.writeEnds) // fails only if the connection is closed
	}
	_ = c.transport.SetReadDeadline(time.Unix(1, 0)) // fails if the client has disconnected
	c.announce()
	c.drainSoon()
}

// setReadDeadline sets the deadline for reading, unless the connection is closing.
func (c *conn) setReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return net.ErrClosed
	}
	return c.transport.SetReadDeadline(t)
}

// received counts a message with QoS 1 or 2 from the client. It returns false if there are more than the broker has
// announced.
func (c *conn) received() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unacked++
	return c.level < 5 || int(c.unacked) <= c.server.cfg.ReceiveMaximum
}

// appendMessage appends the PUBLISH of a delivery. It returns false if the packet is larger than the client accepts; then
// the message is treated as if it had been sent (MQTT 5.0 §3.1.2.11.4). The session's lock is held.
func (c *conn) appendMessage(to []byte, d *delivery, id uint16, dup bool, now time.Time) (out []byte, ok bool) {
	topic, alias := d.topic, uint16(0)
	if c.aliasLimit > 0 {
		known := false
		if alias, known = c.outgoing[topic]; known {
			topic = ""
		} else if len(c.outgoing) < int(c.aliasLimit) {
			alias = uint16(len(c.outgoing) + 1)
		}
	}
	if out = d.appendPublish(to, c.level, id, dup, topic, alias, now); int64(len(out)-len(to)) > int64(c.maxPacket) {
		return to, false
	}
	if alias > 0 && topic != "" {
		if c.outgoing == nil {
			c.outgoing = map[string]uint16{}
		}
		c.outgoing[topic] = alias
	}
	return out, true
}

// timedOut reports whether a read ended because of its deadline.
func timedOut(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// commonName returns the common name in the client's verified certificate, or "".
func (c *conn) commonName() string {
	t := tlsConn(c.transport)
	if t == nil {
		return ""
	}
	chains := t.ConnectionState().VerifiedChains
	if len(chains) == 0 {
		return ""
	}
	return chains[0][0].Subject.CommonName
}
