package stream

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/tripod-run/tripod/internal/guard"
)

const (
	// lingerTime is how long the end of a session waits for the client to close its side (RFC 9112, 9.6).
	lingerTime = 2 * time.Second
	// watchPeriod is how often a connection that nobody reads is looked at.
	watchPeriod = time.Second
	// drainTime is how long a program may still take to read what a client sent before it went.
	drainTime = 5 * time.Second
)

var errClientGone = errors.New("the client is gone")

// session is one HTTP request that becomes a connection of SPDY or WebSocket frames. It is the ResponseWriter that the
// protocol libraries take the connection from, and makes sure of two things that they do not: the request's context
// ends with the client, and the connection with the session.
type session struct {
	http.ResponseWriter
	ctx         context.Context
	cancel      context.CancelCauseFunc
	server      *Server
	spdy        *spdyGuard
	conn        *clientConn // nil until the protocol library has taken it
	stopCutOff  func() bool
	stopAbandon func() bool // takes abandon back

	mu       sync.Mutex
	started  bool // it does what it is for
	released bool // the server does not count it any more
}

// begin makes the session of a request, which the server counts; the request that comes with it carries the session's
// context. maxStreams is how many SPDY streams the client may open; 0 for any number.
func (s *Server) begin(w http.ResponseWriter, r *http.Request, maxStreams int) (*session, *http.Request) {
	ctx, cancel := context.WithCancelCause(r.Context())
	ss := &session{ResponseWriter: w, ctx: ctx, cancel: cancel, server: s}
	if !wsstream.IsWebSocketRequest(r) {
		ss.spdy = newSPDYGuard(maxStreams)
	}
	ss.stopAbandon = context.AfterFunc(s.ctx, ss.abandon)
	return ss, r.WithContext(ctx)
}

// start says that the session begins to do what it is for. It must not once the server has closed.
func (ss *session) start() error {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.released {
		return errServerClosed
	}
	ss.started = true
	return nil
}

// abandon gives a session up that has not started when the server closes: for CreationTimeout, the SPDY library waits for
// the streams even of a client that is gone.
func (ss *session) abandon() {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if !ss.started && !ss.released {
		ss.released = true
		ss.server.sessions.Done()
	}
}

// end closes what is still open. After a session that ran its course, the client gets time to read the end of it.
func (ss *session) end() {
	if ss.conn != nil {
		ss.stopCutOff()
		ss.conn.Close()
	}
	ss.mu.Lock()
	if !ss.released {
		ss.released = true
		ss.server.sessions.Done()
	}
	ss.mu.Unlock()
	ss.stopAbandon()
	ss.cancel(nil)
}

// spawn does work that the server waits for as long as it waits for the session.
func (ss *session) spawn(work func()) {
	work = guard.Func(ss.server.log, "streaming session", work)
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.released {
		go work()
		return
	}
	ss.server.sessions.Go(work)
}

// cutOff closes the connection of a session whose context has ended, so that nobody waits for its client any more. When the
// server itself ends, it notifies the client first if that is quick: an SPDY client takes silence for success.
func (ss *session) cutOff(raw net.Conn) {
	if errors.Is(context.Cause(ss.ctx), errServerClosed) {
		time.AfterFunc(lingerTime, func() { raw.Close() })
		return
	}
	raw.Close()
}

// Hijack hands out the connection (http.Hijacker). What the HTTP server has read too much is read first.
func (ss *session) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	raw, rw, err := http.NewResponseController(ss.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	buffered, _ := rw.Reader.Peek(rw.Reader.Buffered())
	ss.conn = &clientConn{
		Conn:     raw,
		buffered: bytes.NewReader(bytes.Clone(buffered)),
		gone:     ss.cancel,
		spdy:     ss.spdy,
		done:     make(chan struct{}),
		spawn:    ss.spawn,
	}
	ss.stopCutOff = context.AfterFunc(ss.ctx, func() { ss.cutOff(raw) })
	ss.spawn(func() { ss.conn.watch(ss.ctx) })
	return ss.conn, bufio.NewReadWriter(bufio.NewReader(ss.conn), bufio.NewWriter(ss.conn)), nil
}

// clientConn is a client's connection that tells when the client is gone.
type clientConn struct {
	net.Conn
	buffered *bytes.Reader // what the HTTP server has read already
	end      error         // why there is no more to read
	gone     context.CancelCauseFunc
	spdy     *spdyGuard // nil with WebSocket
	spawn    func(func())

	closed atomic.Bool
	done   chan struct{} // closed with closed
}

func (c *clientConn) Read(p []byte) (int, error) {
	n, err := 0, c.end
	if err == nil {
		n, err = c.read(p)
	}
	if c.closed.Load() {
		return 0, io.EOF
	}
	if c.spdy != nil {
		pass, refused := c.spdy.received(p[:n])
		n, err = pass, cmp.Or(refused, err)
	}
	if err == nil {
		return n, nil
	}
	c.end = err
	c.gone(fmt.Errorf("%w: %w", errClientGone, err))
	if n > 0 {
		return n, nil
	}
	if c.spdy != nil {
		c.spdy.settle(c.done)
	}
	return 0, err
}

func (c *clientConn) read(p []byte) (int, error) {
	if c.buffered.Len() > 0 {
		return c.buffered.Read(p)
	}
	return c.Conn.Read(p)
}

// Write does not fail: the SPDY library would wait for ever for a stream whose answer it could not write. The end of the
// session's context shows that the client is gone.
func (c *clientConn) Write(p []byte) (int, error) {
	if _, err := c.Conn.Write(p); err != nil {
		c.gone(fmt.Errorf("%w: %w", errClientGone, err))
	}
	if c.spdy != nil {
		c.spdy.sent(p)
	}
	return len(p), nil
}

// Close ends the connection as a server should: no more is sent, what still arrives is thrown away, and when the client
// closes too, or after lingerTime, all is closed. Closing at once would make the kernel send a reset if the client had sent
// anything unread, and the client might lose what was sent to it last, such as an exit code.
func (c *clientConn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	close(c.done)
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return c.Conn.Close()
	}
	// A timer, not a deadline: the protocol library sets deadlines of its own.
	timer := time.AfterFunc(lingerTime, func() { c.Conn.Close() })
	c.spawn(func() {
		_, _ = io.Copy(io.Discard, c.Conn)
		timer.Stop()
		c.Conn.Close()
	})
	return nil
}

// watch looks after the client until ctx ends. Who reads the connection notices the client's end; while nobody does, because
// a program leaves its input alone, it is noticed here.
func (c *clientConn) watch(ctx context.Context) {
	ticker := time.NewTicker(watchPeriod)
	defer ticker.Stop()
	var since time.Time // when the client was first found to have left
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if !peerGone(c.Conn) {
			continue
		}
		if since.IsZero() {
			since = time.Now()
		}
		if unread(c.Conn) == 0 || time.Since(since) >= drainTime {
			c.gone(errClientGone)
			return
		}
	}
}
