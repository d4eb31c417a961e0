package h2

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	// maxFrame is the largest payload of a frame, in bytes, in both directions (the default of RFC 9113).
	maxFrame = 16 << 10
	// outHigh is how many bytes can wait for the socket before handlers wait too.
	outHigh = 64 << 10
	// readBuffer is the size of a connection's read buffer, in bytes. Payloads that are larger bypass it.
	readBuffer = 2 << 10
	// lingerTime is how long a connection that was ended with GOAWAY is read, so that the client gets that frame and not a
	// reset of TCP.
	lingerTime = time.Second
	// defaultWindow is the window before any settings (RFC 9113, 6.9.2), and maxWindow the largest (6.9.1).
	defaultWindow = 65535
	maxWindow     = 1<<31 - 1
)

var (
	errServerClosed = errors.New("the server was closed")
	errGone         = errors.New("the client does not answer")
)

// conn is a connection.
type conn struct {
	server *Server
	socket net.Conn
	tls    *tls.ConnectionState
	peer   string
	ctx    context.Context
	heard  atomic.Bool // a frame has arrived since the last tick

	// Of the reading goroutine:
	reader *bufio.Reader
	framer *http2.Framer // reads from reader, and writes to out with mu held
	block  *block

	mu           sync.Mutex
	out          []byte    // frames for the socket
	tail         *stream   // whose DATA frame is the last in out, if its length can still grow
	tailAt       int       // where that frame begins
	flushing     bool      // a goroutine writes to the socket
	writeUntil   time.Time // the socket's deadline for writes, of the goroutine that flushes
	drained      sync.Cond
	encoder      *hpack.Encoder
	encoded      bytes.Buffer // what the encoder writes to
	tableChanged bool         // the encoder begins its next block with the size of its table
	failed       error        // the connection has ended
	streams      map[uint32]*stream
	blocked      int      // goroutines that wait at a stream's writable
	handlers     int      // running handlers, of reset streams too
	last         uint32   // highest stream that a client has opened
	resets       []uint32 // the latest streams that we have reset, at most twice as many as can be open; a ring
	reset        int      // next index in resets
	refused      uint32   // streams above it are refused, after GOAWAY
	draining     bool
	closing      bool // the last frame is written
	budget       budget
	updates      budget // for WINDOW_UPDATE, which clients send for small parts of what they have read, and later

	window        int64 // what the client lets us send
	initialWindow int64 // of its new streams
	frameSize     int   // of its frames
	received      inflow

	timer         *time.Timer // calls tick
	silent, idle  time.Duration
	tickInterval  time.Duration
	settingsKnown bool
}

func newConn(s *Server, ctx context.Context, socket net.Conn, state *tls.ConnectionState) *conn {
	c := &conn{
		server: s, socket: socket, tls: state, peer: socket.RemoteAddr().String(), ctx: ctx,
		reader: bufio.NewReaderSize(socket, readBuffer), block: newBlock(s.MaxHeaderBytes),
		streams: map[uint32]*stream{}, refused: maxWindow,
		budget: budget{since: time.Now()}, updates: budget{since: time.Now(), earned: updatesEarned},
		window: defaultWindow, initialWindow: defaultWindow, frameSize: maxFrame,
		received: newInflow(s.ConnWindow),
	}
	c.drained.L = &c.mu
	c.encoder = hpack.NewEncoder(&c.encoded)
	c.framer = http2.NewFramer((*outWriter)(c), c.reader)
	c.framer.SetReuseFrames()
	c.framer.SetMaxReadFrameSize(maxFrame)
	c.tickInterval = min(s.GoneAfter-s.PingAfter, s.IdleTimeout/4)
	c.greet()
	return c
}

// serve serves the connection until it ends.
func (c *conn) serve() {
	defer c.socket.Close()
	_ = c.socket.SetReadDeadline(time.Now().Add(c.server.PrefaceTimeout)) // fails if the connection has ended
	c.mu.Lock()
	c.timer = time.AfterFunc(c.tickInterval, c.tick)
	c.flush()
	c.mu.Unlock()
	err := c.readPreface()
	if err == nil && !isAdequate(c.tls) {
		err = http2.ConnectionError(http2.ErrCodeInadequateSecurity)
	}
	for err == nil {
		err = c.readOne()
	}
	c.end(err)
}

// isAdequate reports whether HTTP/2 allows the cipher suite of a connection (RFC 9113, 9.2.2).
func isAdequate(state *tls.ConnectionState) bool {
	if state == nil || state.Version > tls.VersionTLS12 {
		return true
	}
	switch state.CipherSuite {
	case tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
		tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256:
		return true
	}
	return false
}

// greet writes our settings, which are the first frame.
func (c *conn) greet() {
	s := c.server
	_ = c.framer.WriteSettings(
		http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: uint32(s.MaxStreams)},
		http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(s.StreamWindow)},
		http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: uint32(s.MaxHeaderBytes)},
	)
	_ = c.framer.WriteWindowUpdate(0, uint32(s.ConnWindow-defaultWindow))
}

func (c *conn) readPreface() error {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(c.reader, preface); err != nil {
		return err
	}
	if string(preface) != http2.ClientPreface {
		return protocolError()
	}
	return nil
}

// readFrame reads the next frame. A frame of a header that cannot be decoded ends the connection, because the next header
// could not be decoded either.
func (c *conn) readFrame() (http2.Frame, error) {
	if !c.hasFrame() {
		c.flushBeforeRead()
	}
	header, err := c.framer.ReadFrameHeader()
	if err != nil {
		return nil, err
	}
	f, err := c.framer.ReadFrameForHeader(header)
	if _, ok := errors.AsType[http2.StreamError](err); ok && header.Type == http2.FrameHeaders {
		err = protocolError()
	}
	return f, err
}

// hasFrame reports whether the next frame has been read from the socket completely.
func (c *conn) hasFrame() bool {
	n := c.reader.Buffered()
	if n < frameHeader {
		return false
	}
	h, err := c.reader.Peek(frameHeader)
	return err == nil && n >= frameHeader+(int(h[0])<<16|int(h[1])<<8|int(h[2]))
}

// flushBeforeRead writes what handle has answered before the reading goroutine waits for the client.
func (c *conn) flushBeforeRead() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.out) > 0 {
		c.mu.Unlock()
		runtime.Gosched() // a short handler's answer goes into the same write, and its goroutine does it
		c.mu.Lock()
		c.flush()
	}
}

// readOne reads and handles one frame. It returns an error that ends the connection.
func (c *conn) readOne() error {
	f, err := c.readFrame()
	c.heard.Store(true)
	if h, ok := f.(*http2.HeadersFrame); ok && err == nil {
		err = c.readHeaders(h)
	} else {
		c.mu.Lock()
		if err == nil {
			err = c.handle(f)
		}
		c.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := errors.AsType[http2.StreamError](err); ok {
		err = c.resetFor(e)
	}
	if err == nil {
		err = c.failed
	}
	if err != nil {
		return err
	}
	for len(c.out) >= 2*outHigh && c.failed == nil { // the client sends, and does not read
		if !c.flushing {
			c.flush()
			continue
		}
		c.drained.Wait()
	}
	return nil
}

// resetFor resets a stream whose client has made an error.
func (c *conn) resetFor(e http2.StreamError) error {
	if st := c.streams[e.StreamID]; st != nil {
		st.reset(e.Code, errMalformed)
	} else {
		c.remember(e.StreamID)
		_ = c.framer.WriteRSTStream(e.StreamID, e.Code)
	}
	return c.useless()
}

// remember notes a stream that we reset, for mayNotKnow.
func (c *conn) remember(id uint32) {
	if len(c.resets) < 2*c.server.MaxStreams {
		c.resets = append(c.resets, id)
		return
	}
	c.resets[c.reset] = id
	c.reset = (c.reset + 1) % len(c.resets)
}

// youngStream is the age until which a client's reset of a stream counts as useless. A call that is given up later was
// meant.
const youngStream = 50 * time.Millisecond

// useless spends the budget for useless frames.
func (c *conn) useless() error { return c.spend(&c.budget) }

func (c *conn) spend(b *budget) error {
	if !b.spend() {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return nil
}

func protocolError() error { return http2.ConnectionError(http2.ErrCodeProtocol) }

// handle handles a frame that is not HEADERS. c.mu is held.
func (c *conn) handle(f http2.Frame) error {
	if s, ok := f.(*http2.SettingsFrame); ok {
		return c.settings(s)
	}
	if !c.settingsKnown { // RFC 9113, 3.4
		return protocolError()
	}
	switch f := f.(type) {
	case *http2.DataFrame:
		return c.data(f)
	case *http2.WindowUpdateFrame:
		return c.windowUpdate(f)
	case *http2.PingFrame:
		if f.IsAck() {
			if f.Data == drainPing && c.draining {
				c.drainNow()
			}
			return c.useless()
		}
		_ = c.framer.WritePing(true, f.Data)
		return c.useless()
	case *http2.RSTStreamFrame:
		if c.isIdle(f.StreamID) {
			return protocolError()
		}
		st := c.streams[f.StreamID]
		if st != nil {
			st.end(errReset{f.ErrCode})
		}
		if st != nil && time.Since(st.begun) > youngStream { // the limit of streams bounds how often this can happen
			return nil
		}
		return c.useless()
	case *http2.PriorityFrame:
		if f.StreamDep == f.StreamID {
			return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeProtocol}
		}
		return c.useless()
	case *http2.GoAwayFrame: // the client opens no more streams
		c.drainLocked()
		return c.useless()
	case *http2.PushPromiseFrame:
		return protocolError()
	}
	return c.useless() // of an unknown type
}

// isIdle reports whether a client has not yet opened a stream (RFC 9113, 5.1).
func (c *conn) isIdle(id uint32) bool { return id > c.last || id%2 == 0 }

func (c *conn) settings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		return c.useless()
	}
	if !c.settingsKnown {
		c.settingsKnown = true
		if !c.closing {
			_ = c.socket.SetReadDeadline(time.Time{}) // fails if the connection has ended
		}
	}
	window := c.initialWindow
	err := f.ForeachSetting(func(s http2.Setting) error {
		if err := s.Valid(); err != nil {
			return err
		}
		switch s.ID {
		case http2.SettingInitialWindowSize:
			window = int64(s.Val)
		case http2.SettingMaxFrameSize:
			c.frameSize = int(min(s.Val, maxFrame))
		case http2.SettingHeaderTableSize:
			c.encoder.SetMaxDynamicTableSize(min(s.Val, tableSize))
			c.tableChanged = true
		}
		return nil
	})
	if err != nil {
		return err
	}
	if change := window - c.initialWindow; change != 0 {
		c.initialWindow = window
		for _, st := range c.streams {
			if st.window += change; st.window > maxWindow {
				return http2.ConnectionError(http2.ErrCodeFlowControl)
			}
			st.writable.Broadcast()
		}
	}
	_ = c.framer.WriteSettingsAck()
	return c.useless()
}

func (c *conn) windowUpdate(f *http2.WindowUpdateFrame) error {
	if f.StreamID == 0 {
		if c.window += int64(f.Increment); c.window > maxWindow {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		c.unblock()
		return c.spend(&c.updates)
	}
	if c.isIdle(f.StreamID) {
		return protocolError()
	}
	if st := c.streams[f.StreamID]; st != nil {
		if st.window += int64(f.Increment); st.window > maxWindow {
			return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeFlowControl}
		}
		st.writable.Broadcast()
	}
	return c.spend(&c.updates)
}

func (c *conn) data(f *http2.DataFrame) error {
	if c.isIdle(f.StreamID) {
		return protocolError()
	}
	size := int(f.Length)
	if !c.received.take(size) {
		return http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	data, st := f.Data(), c.streams[f.StreamID]
	switch {
	case st != nil && !st.ended:
		if err := st.receive(data, size, f.StreamEnded()); err != nil {
			return err
		}
	case st == nil && c.mayNotKnow(f.StreamID):
		c.credit(size)
	default:
		c.credit(size)
		return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeStreamClosed}
	}
	if len(data) == 0 && !f.StreamEnded() {
		return c.useless()
	}
	c.budget.earn(1)
	return nil
}

// mayNotKnow reports whether a client may send frames of a closed stream because it does not know yet that we have reset
// or refused it.
func (c *conn) mayNotKnow(id uint32) bool { return id > c.refused || slices.Contains(c.resets, id) }

// credit gives bytes of the connection's window back to the client. It reports whether it has written a frame.
func (c *conn) credit(n int) bool {
	n = c.received.give(n)
	if n > 0 {
		_ = c.framer.WriteWindowUpdate(0, uint32(n))
	}
	return n > 0
}

// readHeaders handles a HEADERS frame: a request, or the trailer of one.
func (c *conn) readHeaders(f *http2.HeadersFrame) error {
	id, ended := f.StreamID, f.StreamEnded()
	selfish := f.HasPriority() && f.Priority.StreamDep == id
	if err := c.readBlock(f); err != nil {
		return err
	}
	if !c.settingsKnown || id%2 == 0 {
		return protocolError()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	st, last := c.streams[id], c.last
	c.last = max(last, id)
	switch {
	case selfish:
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	case st != nil:
		return c.trailer(st, ended)
	case id > c.refused, id <= last && c.mayNotKnow(id):
		return c.useless()
	case id <= last: // closed, or passed over
		return protocolError()
	}
	handler := c.server.Handler
	if c.block.truncated {
		handler = c.server.TooLarge
	}
	r, err := c.request()
	if err != nil || ended && r.ContentLength > 0 {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	}
	return c.open(id, r, ended, handler)
}

// open starts the handler of a request.
func (c *conn) open(id uint32, r *http.Request, ended bool, handler http.Handler) error {
	if c.failed != nil {
		return nil
	}
	if len(c.streams) >= c.server.MaxStreams || c.handlers >= 2*c.server.MaxStreams {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeRefusedStream}
	}
	st := newStream(c, id, r, ended, handler)
	c.streams[id] = st
	c.handlers++
	c.server.workers.run(st)
	return nil
}

// trailer handles the trailer of a request.
func (c *conn) trailer(st *stream, ended bool) error {
	if st.ended {
		return http2.StreamError{StreamID: st.id, Code: http2.ErrCodeStreamClosed}
	}
	if !ended {
		return http2.StreamError{StreamID: st.id, Code: http2.ErrCodeProtocol}
	}
	trailer, err := c.header(c.block.fields) // refuses pseudo-header fields, whose names are no tokens
	if err != nil || c.block.truncated {
		return http2.StreamError{StreamID: st.id, Code: http2.ErrCodeProtocol}
	}
	st.trailer = trailer
	return st.receive(nil, 0, true)
}
