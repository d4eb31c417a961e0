package workerapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/guard"
)

// Handler carries out requests. worker.Worker implements it. A handler owns the files of its requests even if it
// returns an error. The context ends when the server is closed, not when the client disconnects.
type Handler interface {
	Hello() Hello
	// Daemon reports that the first client has subscribed to events, or that the last of them has disconnected. It must
	// not block.
	Daemon(connected bool)
	Load(ctx context.Context, code Code) (Loaded, error)
	Unload(ctx context.Context, digest string) error
	Start(ctx context.Context, spec PodSpec) (Status, error)
	Stop(ctx context.Context, id string, grace time.Duration) (Status, error)
	Kill(ctx context.Context, id string) error
	Remove(ctx context.Context, id string) error
	List(ctx context.Context) ([]Status, error)
	Stats(ctx context.Context, ids []string) ([]Stats, error)
	Metrics(ctx context.Context, ids []string) ([]Metrics, error)
	Profile(ctx context.Context, id string, nth int) (Profile, error)
	Attach(ctx context.Context, id string, session *AttachSession) error
	// Channels makes conn carry the pod's channel messages. The handler owns conn unless Channels returns an error.
	Channels(ctx context.Context, id string, conn net.Conn) error
	ReopenLog(ctx context.Context, id string, file *os.File) error
	UpdateTLS(ctx context.Context, id string, t TLS) error
	// UpdateDialer gives the pod a new connection to the node's dialer. The handler owns the file.
	UpdateDialer(ctx context.Context, id string, dialer *os.File) error
	Update(ctx context.Context, u Update) error
}

// Limits of a connection.
const (
	// maxPending bounds the concurrent requests of a connection; further requests wait in the socket. It must exceed
	// the number of pods on a large node. Otherwise, waiting Stops could block the Kills that would end them.
	maxPending = 8192
	// maxOutbox bounds the bytes queued for a client. Spans are dropped once more than maxSpansOutbox bytes are queued.
	maxOutbox      = 64 << 20
	maxSpansOutbox = 1 << 20
	// replyTimeout bounds the time that a client can take to read the messages queued for it.
	replyTimeout = 30 * time.Second
	// drainTimeout replaces replyTimeout when the server is closed.
	drainTimeout = time.Second
)

// Server serves the protocol on a listener and sends events to the clients that subscribed to them.
type Server struct {
	listener *net.UnixListener
	handler  Handler
	logger   *slog.Logger
	ctx      context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup

	mu      sync.Mutex
	conns   map[*serverConn]bool // true if subscribed to events
	daemons int                  // connected clients that have subscribed to events
}

// NewServer returns a server that owns the listener.
func NewServer(listener *net.UnixListener, handler Handler, logger *slog.Logger) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	return &Server{listener: listener, handler: handler, logger: logger, ctx: ctx, cancel: cancel, conns: map[*serverConn]bool{}}
}

// Serve serves until Close is called, and then returns nil. It accepts clients that run as root or as the server's own
// user.
func (s *Server) Serve() error {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			if s.ctx.Err() != nil {
				return nil
			}
			if isTemporary(err) {
				s.logger.Error("accept failed", "err", err)
				time.Sleep(100 * time.Millisecond) // pacing: no event signals a free descriptor
				continue
			}
			return err
		}
		if err := CheckPeer(conn); err != nil {
			s.logger.Warn("control connection refused", "err", err)
			conn.Close()
			continue
		}
		s.serve(conn)
	}
}

func isTemporary(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ECONNABORTED)
}

// CheckPeer returns an error unless the peer process of a unix connection runs as root or as this process's user.
func CheckPeer(conn *net.UnixConn) error {
	peer, err := fdpass.PeerOf(conn)
	if err != nil {
		return err
	}
	if peer.UID != 0 && peer.UID != os.Geteuid() {
		return fmt.Errorf("process %d of user %d is neither root nor of user %d", peer.PID, peer.UID, os.Geteuid())
	}
	return nil
}

// Close closes the listener, cancels the context of running requests and waits for them. It closes each connection once
// its queued messages are sent, or after drainTimeout.
func (s *Server) Close() error {
	s.cancel()
	err := s.listener.Close()
	s.mu.Lock()
	for c := range s.conns {
		c.finish()
	}
	s.mu.Unlock()
	s.running.Wait()
	return err
}

// Publish sends an event to all subscribed clients. It does not block.
func (s *Server) Publish(e Event) {
	m, size := message{Op: eventExited}, 0
	var body any = e.Exited
	switch {
	case e.Fallback != nil:
		m.Op, body = eventFallback, e.Fallback
	case e.Spans != nil:
		m.Op, body, size = eventSpans, e.Spans, maxSpansOutbox
	}
	var err error
	if m.Body, err = json.Marshal(body); err != nil {
		s.logger.Error("encode event failed", "err", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for c, events := range s.conns {
		if events {
			c.send(m, size)
		}
	}
}

// settleTimeout bounds the wait in settle.
const settleTimeout = 10 * time.Second

// settle waits until all orders of disconnected clients, except Stop, are complete, so that a previous daemon's orders
// do not change pods after the new daemon has listed them.
func (s *Server) settle() {
	deadline := time.NewTimer(settleTimeout)
	defer deadline.Stop()
	for _, c := range s.disconnected() {
		done := make(chan struct{})
		go func() {
			<-c.closed // all requests have been read
			c.orders.Wait()
			close(done)
		}()
		select {
		case <-done:
		case <-deadline.C:
			s.logger.Warn("orders of a previous daemon are still running")
			return
		case <-s.ctx.Done():
			return
		}
	}
}

// disconnected returns the connections that clients have closed. A connection stays in s.conns until its orders are
// complete.
func (s *Server) disconnected() []*serverConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*serverConn
	for c := range s.conns {
		if c.hungUp() {
			list = append(list, c)
		}
	}
	return list
}

func (s *Server) subscribe(c *serverConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if subscribed, ok := s.conns[c]; ok && !subscribed && !c.gone {
		s.conns[c] = true
		if s.daemons++; s.daemons == 1 {
			s.handler.Daemon(true)
		}
	}
}

// ended records that a client has disconnected. Its orders may still be running.
func (s *Server) ended(c *serverConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.gone = true
	if !s.conns[c] {
		return
	}
	if s.daemons--; s.daemons == 0 {
		s.handler.Daemon(false)
	}
}

func (s *Server) serve(conn *net.UnixConn) {
	c := &serverConn{server: s, conn: conn, wake: make(chan struct{}, 1), closed: make(chan struct{}), slots: make(chan struct{}, maxPending)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil { // Close would not see this connection
		conn.Close()
		return
	}
	s.conns[c] = false
	s.running.Go(func() { c.write() })
	s.running.Go(func() {
		err := c.read()
		conn.Close()
		close(c.closed)
		s.ended(c)
		c.orders.Wait()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
			s.logger.Warn("control connection failed", "err", err)
		}
	})
}

// serverConn is one connection: a reader, a writer and a goroutine for each request.
type serverConn struct {
	server *Server
	conn   *net.UnixConn
	slots  chan struct{}
	closed chan struct{}  // the reader has ended
	gone   bool           // likewise; guarded by server.mu
	orders sync.WaitGroup // running requests, except Stop and Hello

	wake   chan struct{}
	mu     sync.Mutex
	outbox [][]byte
	queued int // bytes in outbox
	ending bool
}

func (c *serverConn) read() error {
	r := fdpass.NewReader(c.conn, MaxMessage)
	defer r.Close()
	for {
		f, err := r.Next()
		if err != nil {
			return err
		}
		var m message
		if err := json.Unmarshal(f.Payload, &m); err != nil || m.ID == 0 {
			f.Close()
			return fmt.Errorf("%w: not a JSON request: %w", fdpass.ErrFrame, err)
		}
		c.slots <- struct{}{}
		ended := func() {}
		if m.Op != opStop && m.Op != opHello {
			c.orders.Add(1)
			ended = c.orders.Done
		}
		c.server.running.Go(func() {
			defer func() { ended(); <-c.slots }()
			defer f.Close()
			var body any
			err := guard.Call(c.server.logger, "control request", func() (err error) {
				body, err = c.dispatch(m, &f)
				return err
			})
			c.reply(m.ID, body, err)
		})
	}
}

// hungUp reports whether the connection is closed by either side. Even a closed connection can still have unread
// requests from the client.
func (c *serverConn) hungUp() bool {
	select {
	case <-c.closed:
		return true
	default:
	}
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return true
	}
	gone := true // stays true if Control fails because this side has closed the connection
	_ = raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(poll, 0)
		gone = err == nil && n > 0
	})
	return gone
}

func (c *serverConn) reply(id uint64, body any, err error) {
	m := message{ID: id, Error: fdpass.ToWire(err)}
	if err == nil && body != nil {
		if m.Body, err = json.Marshal(body); err != nil {
			m.Error = fdpass.ToWire(err)
		}
	}
	c.send(m, 0)
}

// send queues a message. It drops the message if more than limit bytes are queued (0 means no limit), and disconnects
// the client if the outbox would exceed maxOutbox.
func (c *serverConn) send(m message, limit int) {
	payload, err := json.Marshal(m)
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case limit > 0 && c.queued > limit:
		return
	case c.queued+len(payload) > maxOutbox:
		c.conn.Close()
		return
	}
	c.outbox, c.queued = append(c.outbox, payload), c.queued+len(payload)
	wake(c.wake)
}

// finish closes the connection once its outbox is empty, or after drainTimeout.
func (c *serverConn) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ending = true
	_ = c.conn.SetWriteDeadline(time.Now().Add(drainTimeout))
	wake(c.wake)
}

// take removes all messages from the outbox and sets the deadline for writing them, unless finish has set a deadline.
func (c *serverConn) take() (out [][]byte, ending bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out, c.outbox = c.outbox, nil
	if !c.ending {
		_ = c.conn.SetWriteDeadline(time.Now().Add(replyTimeout))
	}
	return out, c.ending
}

func (c *serverConn) write() {
	for {
		out, ending := c.take()
		for _, payload := range out {
			if err := fdpass.Write(c.conn, MaxMessage, payload, nil); err != nil {
				c.conn.Close() // this ends read
				return
			}
			c.mu.Lock()
			c.queued -= len(payload)
			c.mu.Unlock()
		}
		if len(out) > 0 {
			continue
		}
		if ending {
			c.conn.Close()
			return
		}
		select {
		case <-c.wake:
		case <-c.closed:
			return
		}
	}
}

// dispatch carries out one request.
func (c *serverConn) dispatch(m message, f *fdpass.Frame) (any, error) {
	h, ctx := c.server.handler, c.server.ctx
	switch m.Op {
	case opHello:
		return serve(m, f, func(r *helloRequest) (Hello, error) {
			if r.Events {
				c.server.settle()
				c.server.subscribe(c)
			}
			return h.Hello(), nil
		})
	case opLoad:
		return serve(m, f, func(r *Code) (Loaded, error) { return h.Load(ctx, *r) })
	case opUnload:
		return done(m, f, func(r *Code) error { return h.Unload(ctx, r.Digest) })
	case opStart:
		return serve(m, f, func(r *PodSpec) (Status, error) { return h.Start(ctx, *r) })
	case opStop:
		return serve(m, f, func(r *idRequest) (Status, error) { return h.Stop(ctx, r.ID, r.Grace) })
	case opKill:
		return done(m, f, func(r *idRequest) error { return h.Kill(ctx, r.ID) })
	case opRemove:
		return done(m, f, func(r *idRequest) error { return h.Remove(ctx, r.ID) })
	case opList:
		return serve(m, f, func(*idRequest) ([]Status, error) { return h.List(ctx) })
	case opStats:
		return serve(m, f, func(r *idsRequest) ([]Stats, error) { return h.Stats(ctx, r.IDs) })
	case opProfile:
		return serve(m, f, func(r *profileRequest) (Profile, error) { return h.Profile(ctx, r.ID, r.Nth) })
	case opMetrics:
		return serve(m, f, func(r *idsRequest) ([]Metrics, error) { return h.Metrics(ctx, r.IDs) })
	case opAttach:
		return done(m, f, func(r *attachRequest) error { return attach(ctx, h, r) })
	case opChannels:
		return done(m, f, func(r *channelsRequest) error { return channels(ctx, h, r) })
	case opReopenLog:
		return done(m, f, func(r *fileRequest) error { return h.ReopenLog(ctx, r.ID, r.File.File) })
	case opUpdateTLS:
		return done(m, f, func(r *tlsRequest) error { return h.UpdateTLS(ctx, r.ID, r.TLS) })
	case opDialer:
		return done(m, f, func(r *fileRequest) error { return h.UpdateDialer(ctx, r.ID, r.File.File) })
	case opUpdate:
		return done(m, f, func(r *Update) error { return h.Update(ctx, *r) })
	}
	return nil, fmt.Errorf("operation %q: %w", m.Op, errdefs.ErrNotImplemented)
}

func serve[Q, R any](m message, f *fdpass.Frame, do func(*Q) (R, error)) (any, error) {
	var request Q
	if err := unpack(m.Body, f, &request); err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	return do(&request)
}

func done[Q any](m message, f *fdpass.Frame, do func(*Q) error) (any, error) {
	return serve(m, f, func(r *Q) (any, error) { return nil, do(r) })
}
