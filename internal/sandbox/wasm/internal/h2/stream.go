package h2

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
)

// inflow is a window for what a client sends (RFC 9113, 5.2). Bytes are given back a quarter of the window at a time.
type inflow struct{ size, available, pending int }

func newInflow(size int) inflow { return inflow{size: size, available: size} }

// take takes n bytes, and reports whether the client was allowed to send them.
func (f *inflow) take(n int) bool {
	if n > f.available {
		return false
	}
	f.available -= n
	return true
}

// give returns by how much to enlarge the client's window now that n bytes are read.
func (f *inflow) give(n int) int {
	f.pending += n
	if f.pending < f.size/4 {
		return 0
	}
	n, f.pending = f.pending, 0
	f.available += n
	return n
}

// stream is a request and its response. It is open, and in conn.streams, until both sides have ended it or one has reset
// it.
type stream struct {
	id      uint32
	conn    *conn
	request *http.Request
	handler http.Handler
	begun   time.Time
	cancel  context.CancelFunc

	// The request's body. conn.mu guards these fields and those of the response below.
	readable  sync.Cond // data, an end, or a deadline
	unread    unread
	ended     bool  // the client has sent everything
	failure   error // why there is no more, other than the end
	closed    bool  // nobody reads the body
	remaining int64 // of Content-Length; negative if there was none
	received  inflow
	trailer   http.Header
	late      bool // the deadline for reads has passed
	readTimer *time.Timer

	expects bool // the client waits for 100 Continue

	response    response
	writable    sync.Cond // a window, a place in conn.out, or an end
	window      int64     // what the client lets us send
	writeTimer  *time.Timer
	handlerDone bool
}

// newStream returns the stream of a request. c.mu is held.
func newStream(c *conn, id uint32, r *http.Request, ended bool, handler http.Handler) *stream {
	st := &stream{
		id: id, conn: c, handler: handler, begun: time.Now(), ended: ended, remaining: r.ContentLength,
		received: newInflow(c.server.StreamWindow),
		window:   c.initialWindow,
	}
	st.readable.L, st.writable.L = &c.mu, &c.mu
	st.response.stream = st
	ctx, cancel := context.WithCancel(c.ctx)
	st.cancel = cancel
	if ended {
		r.Body, r.ContentLength = http.NoBody, 0
	} else {
		r.Body = (*body)(st)
		r.Trailer = announcedTrailer(r.Header)
	}
	st.expects = !ended && r.ContentLength != 0 && strings.EqualFold(r.Header.Get("Expect"), "100-continue")
	delete(r.Header, "Expect") // as net/http does
	delete(r.Header, "Trailer")
	st.request = r.WithContext(ctx)
	return st
}

// run calls the handler.
func (st *stream) run() {
	defer func() {
		p := recover()
		st.conn.mu.Lock()
		if p != nil {
			st.reset(http2.ErrCodeInternal, http.ErrAbortHandler)
		} else {
			st.finish()
		}
		st.conn.handlers--
		st.handlerDone, st.closed = true, true
		st.readable.Broadcast()
		st.stopTimers()
		if st.conn.handlers > 0 && len(st.conn.out) < smallWrite {
			st.conn.mu.Unlock()
			runtime.Gosched() // other answers go into the same write
			st.conn.mu.Lock()
		}
		st.conn.flush()
		st.conn.endIfDrained()
		st.conn.mu.Unlock()
		st.cancel()
		if p != nil && p != http.ErrAbortHandler {
			st.conn.server.Logger.Error("HTTP/2 handler panicked", "panic", p, "peer", st.conn.peer, "stack", string(debug.Stack()))
		}
	}()
	st.handler.ServeHTTP(&st.response, st.request)
}

func (st *stream) stopTimers() {
	for _, t := range []*time.Timer{st.readTimer, st.writeTimer} {
		if t != nil {
			t.Stop()
		}
	}
}

// smallWrite is how much has to be there for the socket, in bytes, so that an answer does not wait for those of other
// handlers that are about to end.
const smallWrite = 1000

// isOpen reports whether the stream is in conn.streams.
func (st *stream) isOpen() bool { return st.conn.streams[st.id] == st }

// errFinished is the error of writes after the response.
var errFinished = errors.New("the response has ended")

// ending returns why nothing more can be sent, or nil.
func (st *stream) ending() error {
	if st.isOpen() {
		return nil
	}
	return st.failure
}

// end removes the stream from the connection, because both sides have ended it (err is nil), or for an error.
func (st *stream) end(err error) {
	c := st.conn
	if !st.isOpen() {
		return
	}
	delete(c.streams, st.id)
	c.idle = 0
	c.credit(st.unread.discard())
	if err == nil {
		c.budget.earn(2)
		err = errFinished
	}
	st.failure = err
	st.readable.Broadcast()
	st.writable.Broadcast()
	st.cancel()
}

// reset ends the stream with RST_STREAM.
func (st *stream) reset(code http2.ErrCode, err error) {
	c := st.conn
	if !st.isOpen() || c.failed != nil {
		return
	}
	if !st.ended {
		c.remember(st.id)
	}
	_ = c.framer.WriteRSTStream(st.id, code)
	st.end(err)
}

// receive takes a DATA frame of the given size, with its padding.
func (st *stream) receive(data []byte, size int, ended bool) error {
	if !st.received.take(size) {
		st.conn.credit(size)
		return http2.StreamError{StreamID: st.id, Code: http2.ErrCodeFlowControl}
	}
	if st.remaining >= 0 {
		if st.remaining -= int64(len(data)); st.remaining < 0 || ended && st.remaining > 0 {
			st.conn.credit(size)
			return http2.StreamError{StreamID: st.id, Code: http2.ErrCodeProtocol}
		}
	}
	st.ended = ended
	dropped := size - len(data)
	if st.closed {
		dropped = size
	} else {
		st.unread.add(data)
	}
	st.consumed(dropped)
	st.readable.Broadcast()
	return nil
}

// consumed gives n bytes of the windows back to the client. It reports whether it has written a frame.
func (st *stream) consumed(n int) bool {
	enlarge := st.received.give(n)
	if enlarge > 0 && !st.ended && st.isOpen() {
		_ = st.conn.framer.WriteWindowUpdate(st.id, uint32(enlarge))
	}
	return st.conn.credit(n) || enlarge > 0
}

// body is the stream's view as a request's body.
type body stream

// Read implements io.Reader. At the end it sets the request's trailer.
func (b *body) Read(p []byte) (int, error) {
	st := (*stream)(b)
	c := st.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if st.expects {
		st.expects = false
		st.writeHeaders(http.StatusContinue, nil, false)
		c.flush()
	}
	for {
		switch {
		case st.closed:
			return 0, http.ErrBodyReadAfterClose
		case st.late:
			return 0, os.ErrDeadlineExceeded
		case st.failure != nil:
			return 0, st.failure
		case st.unread.size > 0:
			n := st.unread.take(p)
			if st.consumed(n) {
				c.flush()
			}
			return n, nil
		case st.ended:
			for key, values := range st.trailer {
				if httpguts.ValidTrailerHeader(key) {
					st.request.Trailer[key] = values
				}
			}
			st.trailer = nil
			return 0, io.EOF
		case len(p) == 0:
			return 0, nil
		}
		st.readable.Wait()
	}
}

// Close implements io.Closer. What the client sends after it is dropped.
func (b *body) Close() error {
	st := (*stream)(b)
	st.conn.mu.Lock()
	defer st.conn.mu.Unlock()
	if st.closed {
		return nil
	}
	st.closed = true
	st.readable.Broadcast()
	if st.consumed(st.unread.discard()) {
		st.conn.flush()
	}
	return nil
}

// announcedTrailer returns the fields that a request announces for its trailer, without values.
func announcedTrailer(header http.Header) http.Header {
	trailer := http.Header{}
	for _, list := range header["Trailer"] {
		for name := range strings.SplitSeq(list, ",") {
			if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); httpguts.ValidTrailerHeader(name) {
				trailer[name] = nil
			}
		}
	}
	return trailer
}

// setDeadline calls f, with conn.mu held, at the time t, unless it is called again or the handler returns before that. f
// is called now if t has passed. The zero time is no deadline.
func (st *stream) setDeadline(slot **time.Timer, t time.Time, f func()) {
	if *slot != nil {
		(*slot).Stop()
		*slot = nil
	}
	if t.IsZero() || st.handlerDone {
		return
	}
	wait := time.Until(t)
	if wait <= 0 {
		f()
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(wait, func() {
		st.conn.mu.Lock()
		defer st.conn.mu.Unlock()
		if *slot == timer && !st.handlerDone {
			f()
		}
	})
	*slot = timer
}

// setReadDeadline ends reads of the body at the time t. It has no effect on what the client has sent completely.
func (st *stream) setReadDeadline(t time.Time) {
	st.conn.mu.Lock()
	defer st.conn.mu.Unlock()
	st.late = false
	if st.ended {
		t = time.Time{}
	}
	st.setDeadline(&st.readTimer, t, func() {
		st.late = true
		st.readable.Broadcast()
	})
}

// setWriteDeadline resets the stream at the time t, because its client could not get a status either.
func (st *stream) setWriteDeadline(t time.Time) {
	st.conn.mu.Lock()
	defer st.conn.mu.Unlock()
	st.setDeadline(&st.writeTimer, t, func() {
		st.reset(http2.ErrCodeInternal, os.ErrDeadlineExceeded)
		st.conn.flush()
	})
}
