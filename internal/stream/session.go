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
	// lingerTime limits how long a closed session waits for the client to close its side (RFC 9112, 9.6).
	lingerTime = 2 * time.Second
	// watchPeriod is how often a session checks whether the client is gone.
	watchPeriod = time.Second
	// drainTime limits how long a program can take to read what a client sent before the client went away.
	drainTime = 5 * time.Second
)

var errClientGone = errors.New("the client is gone")

// session is an HTTP request whose connection the protocol libraries hijack, for SPDY or WebSocket frames. It ensures
// that the request's context ends when the client is gone, and that the connection is closed when the session ends.
type session struct {
	http.ResponseWriter
	ctx         context.Context
	cancel      context.CancelCauseFunc
	server      *Server
	spdy        *spdyGuard
	conn        *clientConn // nil until the protocol library has taken it
	stopCutOff  func() bool
	stopAbandon func() bool

	mu       sync.Mutex
	started  bool
	released bool // Server.Close no longer waits for the session
}

// begin makes the session for a request. Call it after Server.enter. The returned request carries the session's
// context. maxStreams limits the SPDY streams that the client may open; 0 means no limit.
func (s *Server) begin(w http.ResponseWriter, r *http.Request, maxStreams int) (*session, *http.Request) {
	ctx, cancel := context.WithCancelCause(r.Context())
	ss := &session{ResponseWriter: w, ctx: ctx, cancel: cancel, server: s}
	if !wsstream.IsWebSocketRequest(r) {
		ss.spdy = newSPDYGuard(maxStreams)
	}
	ss.stopAbandon = context.AfterFunc(s.ctx, ss.abandon)
	return ss, r.WithContext(ctx)
}

// start marks the session as started. It fails if the server has already closed.
func (ss *session) start() error {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.released {
		return errServerClosed
	}
	ss.started = true
	return nil
}

// abandon is called when the server closes, and releases a session that has not started yet. Otherwise Close would wait
// for it: the SPDY library waits for the client's streams until CreationTimeout is over, even if the client is gone.
func (ss *session) abandon() {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if !ss.started && !ss.released {
		ss.released = true
		ss.server.sessions.Done()
	}
}

// end closes the connection and releases the session. The client still has lingerTime to read the session's last bytes.
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

// spawn runs work in a goroutine. Server.Close waits for that goroutine, unless the session is already released.
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

// cutOff closes the connection of a session whose context has ended, so that nothing waits for the client. If the
// server is closing, cutOff closes the connection only after lingerTime, so that the session can still notify the
// client, because an SPDY client takes silence for success.
func (ss *session) cutOff(raw net.Conn) {
	if errors.Is(context.Cause(ss.ctx), errServerClosed) {
		time.AfterFunc(lingerTime, func() { raw.Close() })
		return
	}
	raw.Close()
}

// Hijack returns the connection (http.Hijacker). Reads first return what the HTTP server has already buffered.
func (ss *session) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	raw, rw, err := http.NewResponseController(ss.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	buffered, _ := rw.Reader.Peek(rw.Reader.Buffered())
	ss.conn = &clientConn{
		Conn:   raw,
		reader: io.MultiReader(bytes.NewReader(bytes.Clone(buffered)), raw),
		gone:   ss.cancel,
		spdy:   ss.spdy,
		done:   make(chan struct{}),
		spawn:  ss.spawn,
	}
	ss.stopCutOff = context.AfterFunc(ss.ctx, func() { ss.cutOff(raw) })
	ss.spawn(func() { ss.conn.watch(ss.ctx) })
	return ss.conn, bufio.NewReadWriter(bufio.NewReader(ss.conn), bufio.NewWriter(ss.conn)), nil
}

// clientConn is a client's connection. It calls gone when the client is gone.
type clientConn struct {
	net.Conn
	reader io.Reader // what the HTTP server has buffered, then Conn
	end    error     // the error that ended reading
	gone   context.CancelCauseFunc
	spdy   *spdyGuard // nil with WebSocket
	spawn  func(func())

	closed atomic.Bool
	done   chan struct{} // closed by Close
}

func (c *clientConn) Read(p []byte) (int, error) {
	n, err := 0, c.end
	if err == nil {
		n, err = c.reader.Read(p)
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

// Write never fails, because the SPDY library would wait forever on a stream if it could not write the stream's answer.
// If the client is gone, the session's context ends.
func (c *clientConn) Write(p []byte) (int, error) {
	if _, err := c.Conn.Write(p); err != nil {
		c.gone(fmt.Errorf("%w: %w", errClientGone, err))
	}
	if c.spdy != nil {
		c.spdy.sent(p)
	}
	return len(p), nil
}

// Close shuts down the writing side, and discards what still arrives until the client closes too or lingerTime is over.
// Then it closes the connection. An immediate close with unread input would make the kernel send a reset, and the
// client might lose the last bytes, such as an exit code.
func (c *clientConn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	close(c.done)
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return c.Conn.Close()
	}
	// A deadline would not work, because the protocol library sets its own deadlines.
	timer := time.AfterFunc(lingerTime, func() { c.Conn.Close() })
	c.spawn(func() {
		_, _ = io.Copy(io.Discard, c.Conn)
		timer.Stop()
		c.Conn.Close()
	})
	return nil
}

// watch checks periodically, until ctx ends, whether the client is gone. Read notices that too, unless the program
// ignores its input.
func (c *clientConn) watch(ctx context.Context) {
	ticker := time.NewTicker(watchPeriod)
	defer ticker.Stop()
	var since time.Time // when the client was first found to be gone
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
