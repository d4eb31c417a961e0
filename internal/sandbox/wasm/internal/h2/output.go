package h2

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/net/http2"
)

// frameHeader is the size of a frame's header, in bytes (RFC 9113, 4.1).
const frameHeader = 9

// outBuffers are buffers for conn.out, so that idle connections have none.
var outBuffers = sync.Pool{New: func() any { return new([]byte) }}

// outWriter lets a framer append to conn.out. conn.mu is held.
type outWriter conn

// Write implements io.Writer.
func (w *outWriter) Write(p []byte) (int, error) {
	if w.closing { // nothing can follow
		return len(p), nil
	}
	(*conn)(w).room()
	w.out = append(w.out, p...)
	w.tail = nil
	return len(p), nil
}

// room gets a buffer for out.
func (c *conn) room() {
	if c.out == nil {
		c.out = (*outBuffers.Get().(*[]byte))[:0]
	}
}

// appendData appends a part of a stream's data, which is no longer than the windows allow. Small parts share a frame.
func (c *conn) appendData(st *stream, data []byte) {
	c.room()
	c.updates.earn(2 + len(data)/512)
	if size := len(c.out) - c.tailAt - frameHeader; c.tail == st && size+len(data) <= c.frameSize {
		setLength(c.out[c.tailAt:], size+len(data))
	} else {
		c.budget.earn(2)
		c.tail, c.tailAt = st, len(c.out)
		c.out = append(c.out, 0, 0, 0, byte(http2.FrameData), 0, 0, 0, 0, 0)
		setLength(c.out[c.tailAt:], len(data))
		binary.BigEndian.PutUint32(c.out[c.tailAt+5:], st.id)
	}
	c.out = append(c.out, data...)
}

// setLength sets the length in a frame's header.
func setLength(header []byte, n int) {
	header[0], header[1], header[2] = byte(n>>16), byte(n>>8), byte(n)
}

// endData ends a stream with its last DATA frame.
func (c *conn) endData(st *stream) {
	if c.tail != st {
		c.appendData(st, nil)
	}
	c.out[c.tailAt+4] |= byte(http2.FlagDataEndStream)
	c.tail = nil
}

// flush writes out to the socket, unless another goroutine does that already. c.mu is held, and released while the socket
// is written.
func (c *conn) flush() {
	if !c.flushing && len(c.out) > 0 {
		c.flushing = true
		c.flushRound(false)
	}
}

// flushRound writes what is there. What is added meanwhile is written by another goroutine, because the caller has a
// request of its own.
func (c *conn) flushRound(all bool) {
	for len(c.out) > 0 && c.failed == nil {
		b := c.out
		c.out, c.tail = nil, nil
		c.mu.Unlock()
		err := c.write(b)
		if cap(b) <= 4*outHigh {
			outBuffers.Put(&b)
		}
		c.mu.Lock()
		if err != nil {
			c.fail(err)
		}
		c.wake()
		if !all && len(c.out) > 0 && c.failed == nil {
			go func() {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.flushRound(true)
			}()
			return
		}
	}
	c.flushing = false
	c.endIfDrained()
}

// wake wakes those who wait for a place in out.
func (c *conn) wake() {
	c.drained.Broadcast()
	c.unblock()
}

// unblock wakes the handlers that wait to send.
func (c *conn) unblock() {
	if c.blocked == 0 { // as nearly always
		return
	}
	for _, st := range c.streams {
		st.writable.Broadcast()
	}
}

// write writes to the socket. It fails if the client reads nothing for Config.StuckTime, or three quarters of it. Only the
// goroutine that flushes calls it.
func (c *conn) write(b []byte) error {
	for len(b) > 0 {
		piece := b
		if c.tls != nil { // a write over TLS cannot continue after a timeout, so it must be small
			piece = b[:min(len(b), maxFrame)]
		}
		if now := time.Now(); now.After(c.writeUntil.Add(-c.server.StuckTime * 3 / 4)) { // not for each write: it takes a while
			c.writeUntil = now.Add(c.server.StuckTime)
			_ = c.socket.SetWriteDeadline(c.writeUntil) // fails if the connection has ended
		}
		n, err := c.socket.Write(piece)
		if err != nil && (n == 0 || !errors.Is(err, os.ErrDeadlineExceeded)) {
			return err
		}
		b = b[n:]
	}
	return nil
}

// send sends a part of the response's body. It waits for the windows, and for a place in out. conn.mu is held.
func (st *stream) send(data []byte) error {
	c := st.conn
	for len(data) > 0 {
		if err := st.ending(); err != nil {
			return err
		}
		n := int(min(int64(len(data)), int64(c.frameSize), st.window, c.window))
		if n <= 0 || len(c.out) >= outHigh {
			if !c.flushing && len(c.out) > 0 {
				c.flush()
				continue
			}
			c.blocked++
			st.writable.Wait()
			c.blocked--
			continue
		}
		c.appendData(st, data[:n])
		st.window -= int64(n)
		c.window -= int64(n)
		data = data[n:]
	}
	return nil
}
