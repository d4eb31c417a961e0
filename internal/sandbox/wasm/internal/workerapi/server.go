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

// Handler carries out requests. Implemented by the worker. Files of requests become the handler's, also when there is an
// error. ctx ends when the server is closed, not when the client goes away.
type Handler interface {
	Hello() Hello
	Load(ctx context.Context, code Code) (Loaded, error)
	Unload(ctx context.Context, digest string) error
	Start(ctx context.Context, spec PodSpec) (Status, error)
	Stop(ctx context.Context, id string, grace time.Duration) (Status, error)
	Kill(ctx context.Context, id string) error
	Remove(ctx context.Context, id string) error
	List(ctx context.Context) ([]Status, error)
	Stats(ctx context.Context, ids []string) ([]Stats, error)
	Metrics(ctx context.Context, ids []string) ([]Metrics, error)
	Attach(ctx context.Context, id string, session *AttachSession) error
	// Channels joins the pod's channels to a connection, which is the handler's unless there is an error.
	Channels(ctx context.Context, id string, conn net.Conn) error
	ReopenLog(ctx context.Context, id string, file *os.File) error
	UpdateTLS(ctx context.Context, id string, t TLS) error
	Update(ctx context.Context, u Update) error
}

// Limits of a connection.
const (
	// maxPending is how many requests of a connection are carried out at a time; more wait in the socket. Stops of all pods of
	// a large node must fit, or the Kill that would end them would wait behind them.
	maxPending = 8192
	// maxOutbox is how many bytes wait for a client to read them, maxSpansOutbox how many of them may be spans.
	maxOutbox      = 64 << 20
	maxSpansOutbox = 1 << 20
	// replyTimeout is how long a client may take to make room for what waits for it.
	replyTimeout = 30 * time.Second
	// farewell is how long they all may take when the server is closed.
	farewell = time.Second
)

// Server serves the protocol on a listener and sends events to all who want them.
type Server struct {
	listener *net.UnixListener
	handler  Handler
	logger   *slog.Logger
	ctx      context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup

	mu    sync.Mutex
	conns map[*serverConn]bool
}

// NewServer is a server on a listener, which becomes the server's.
func NewServer(listener *net.UnixListener, handler Handler, logger *slog.Logger) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	return &Server{listener: listener, handler: handler, logger: logger, ctx: ctx, cancel: cancel, conns: map[*serverConn]bool{}}
}

// Serve serves until Close is called; it returns nil then. Clients must be root or of the server's own user.
func (s *Server) Serve() error {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			if s.ctx.Err() != nil {
				return nil
			}
			if isTemporary(err) {
				s.logger.Error("a daemon's connection could not be accepted", "err", err)
				time.Sleep(100 * time.Millisecond) // descriptors become free when connections or pods end: there is nothing to wait for
				continue
			}
			return err
		}
		if err := CheckPeer(conn); err != nil {
			s.logger.Warn("a control connection was refused", "err", err)
			conn.Close()
			continue
		}
		s.serve(conn)
	}
}

func isTemporary(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ECONNABORTED)
}

// CheckPeer is an error unless the other end of a unix connection is a process of root's or of this process's own user.
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

// Close ends the listener and all connections, once clients have been sent what waits for them, and waits for requests
// under way, whose context ends.
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

// Publish sends an event to all clients that subscribed; it does not block.
func (s *Server) Publish(e Event) {
	m, size := message{Op: eventExited}, 0
	var body any = e.Exited
	if e.Spans != nil {
		m.Op, body, size = eventSpans, e.Spans, maxSpansOutbox
	}
	var err error
	if m.Body, err = json.Marshal(body); err != nil {
		s.logger.Error("an event could not be sent", "err", err)
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

// settleTimeout bounds the waiting for what a daemon that is gone had asked for.
const settleTimeout = 10 * time.Second

// settle waits until the orders of clients that are gone have been carried out, Stops aside, so that a daemon that takes
// over does not meet, later, the work of the one before.
func (s *Server) settle() {
	deadline := time.NewTimer(settleTimeout)
	defer deadline.Stop()
	for _, c := range s.gone() {
		done := make(chan struct{})
		go func() {
			<-c.closed // its requests have all been read
			c.orders.Wait()
			close(done)
		}()
		select {
		case <-done:
		case <-deadline.C:
			s.logger.Warn("orders of an earlier daemon are still under way")
			return
		case <-s.ctx.Done():
			return
		}
	}
}

// gone lists the connections whose clients have closed them, read to their end or not, and that have orders under way.
func (s *Server) gone() []*serverConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	var gone []*serverConn
	for c := range s.conns {
		if c.hungUp() {
			gone = append(gone, c)
		}
	}
	return gone
}

func (s *Server) subscribe(c *serverConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.conns[c]; ok {
		s.conns[c] = true
	}
}

func (s *Server) serve(conn *net.UnixConn) {
	c := &serverConn{server: s, conn: conn, wake: make(chan struct{}, 1), closed: make(chan struct{}), slots: make(chan struct{}, maxPending)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil { // Close has seen all connections that it will
		conn.Close()
		return
	}
	s.conns[c] = false
	s.running.Go(func() { c.write() })
	s.running.Go(func() {
		err := c.read()
		conn.Close()
		close(c.closed)
		c.orders.Wait()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
			s.logger.Warn("a control connection has broken", "err", err)
		}
	})
}

// serverConn is one connection: a reader, a writer and a goroutine for each request.
type serverConn struct {
	server *Server
	conn   *net.UnixConn
	slots  chan struct{}
	closed chan struct{}  // the reader has ended
	orders sync.WaitGroup // requests under way, Stops aside

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
			return fmt.Errorf("%w: neither a request nor JSON: %w", fdpass.ErrFrame, err)
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

// hungUp tells whether the client has closed the connection.
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
	gone := true // also when the connection has been closed on this side
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

// send queues a message unless more than limit (0: maxOutbox) waits already: over maxOutbox, the client has stopped reading
// and is cut off; over a lower limit, the message is dropped.
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
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// finish closes the connection when its outbox is empty, or soon.
func (c *serverConn) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ending = true
	_ = c.conn.SetWriteDeadline(time.Now().Add(farewell))
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// take empties the outbox; writing it is bounded, unless the bound of finish holds already.
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
				c.conn.Close() // the reader ends, too
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
