package h2

import (
	"errors"
	"io"
	"net"
	"strings"
	"time"

	"golang.org/x/net/http2"
)

// tick finds clients that are gone or idle.
func (c *conn) tick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed != nil {
		return
	}
	if c.silent += c.tickInterval; c.heard.Swap(false) {
		c.silent = 0
	}
	if c.idle += c.tickInterval; len(c.streams) > 0 {
		c.idle = 0
	}
	switch {
	case c.silent >= c.server.GoneAfter:
		c.fail(errGone)
		return
	case c.silent >= c.server.PingAfter:
		_ = c.framer.WritePing(false, [8]byte{})
		c.flush()
	case c.idle >= c.server.IdleTimeout:
		c.drainLocked()
	}
	c.timer.Reset(c.tickInterval)
}

// drainPing is the ping whose answer says that the client has seen GOAWAY.
var drainPing = [8]byte{'g', 'o', 'a', 'w', 'a', 'y'}

// drain ends the connection after the requests in progress. The client can begin further requests until it has seen
// GOAWAY (RFC 9113, 6.8).
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drainLocked()
}

func (c *conn) drainLocked() {
	if c.draining || c.failed != nil {
		return
	}
	c.draining = true
	_ = c.framer.WriteGoAway(maxWindow, http2.ErrCodeNo, nil)
	_ = c.framer.WritePing(false, drainPing)
	c.flush()
	time.AfterFunc(lingerTime, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.drainNow()
	})
}

// drainNow refuses further requests, and ends the connection if there is none.
func (c *conn) drainNow() {
	if c.refused == maxWindow && c.failed == nil {
		c.refused = c.last
		_ = c.framer.WriteGoAway(c.last, http2.ErrCodeNo, nil)
		c.flush()
	}
	c.endIfDrained()
}

// endIfDrained ends the connection if no further request can come and everything is written. The client closes it too;
// until then its frames are read, so that it loses nothing to a reset of TCP.
func (c *conn) endIfDrained() {
	if c.refused == maxWindow || len(c.streams) > 0 || len(c.out) > 0 || c.flushing || c.closing || c.failed != nil {
		return
	}
	c.closing = true
	go func() {
		if c.closeWrite() != nil {
			c.abort(net.ErrClosed)
		}
	}()
}

// closeWrite ends our side of the connection, and bounds the wait for the client's.
func (c *conn) closeWrite() error {
	half, ok := c.socket.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	if err := half.CloseWrite(); err != nil {
		return err
	}
	return c.socket.SetReadDeadline(time.Now().Add(lingerTime))
}

// abort closes the connection.
func (c *conn) abort(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail(err)
}

// fail ends all streams and closes the socket, which ends serve. c.mu is held.
func (c *conn) fail(err error) {
	if c.failed != nil {
		return
	}
	c.failed = err
	if c.timer != nil {
		c.timer.Stop()
	}
	for _, st := range c.streams {
		st.end(errDisconnected{err})
	}
	c.drained.Broadcast()
	go c.socket.Close() // can wait for a write over TLS
}

// end ends the connection for an error of readOne. It tells a client that broke the rules.
func (c *conn) end(err error) {
	code := http2.ErrCodeNo
	broken, ok := errors.AsType[http2.ConnectionError](err)
	switch {
	case ok:
		code = http2.ErrCode(broken)
	case errors.Is(err, http2.ErrFrameTooLarge):
		code = http2.ErrCodeFrameSize
	}
	c.mu.Lock()
	if code == http2.ErrCodeNo || c.failed != nil {
		c.fail(err)
		c.mu.Unlock()
		return
	}
	for _, st := range c.streams {
		st.end(errDisconnected{err})
	}
	_ = c.framer.WriteGoAway(min(c.last, c.refused), code, nil)
	c.flush()
	for c.flushing && c.failed == nil {
		c.drained.Wait()
	}
	c.mu.Unlock()
	if c.closeWrite() == nil {
		_, _ = io.Copy(io.Discard, io.LimitReader(c.socket, 1<<20))
	}
	c.abort(err)
}

// errReset says that the client has reset a stream.
type errReset struct{ code http2.ErrCode }

func (e errReset) Error() string {
	return "the client has reset the stream: " + strings.ToLower(e.code.String())
}

// errDisconnected says that the connection has ended.
type errDisconnected struct{ cause error }

func (e errDisconnected) Error() string {
	if errors.Is(e.cause, io.EOF) {
		return "the client has disconnected"
	}
	return "the connection has ended: " + e.cause.Error()
}
