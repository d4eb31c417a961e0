package fdpass

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Limits of the service. They are needed because clients are not trusted.
const (
	// MaxRequest and MaxReply limit the length of the messages, in bytes.
	MaxRequest = 16 << 10
	MaxReply   = 256 << 10
	// maxPerUser limits the connections of each user except root. The server refuses further connections.
	maxPerUser = 4
	// requestTimeout limits the wait for a client's request. replyTimeout limits the wait until the client reads the
	// reply.
	requestTimeout = 5 * time.Second
	replyTimeout   = 5 * time.Second
)

// Reply is the result of a Handler.
type Reply struct {
	// Body is sent as JSON.
	Body any
	// Files are sent with the reply. The server closes them, even if it could not send the reply.
	Files []*os.File
}

// Handler handles a peer's request. ctx ends when the server is closed or the client disconnects. The client receives
// the text and the class of an error.
type Handler func(ctx context.Context, peer Peer, request []byte) (Reply, error)

// reply is the JSON form of a reply.
type reply struct {
	Error *Error          `json:"error,omitempty"`
	Body  json.RawMessage `json:"body,omitempty"`
}

// Server answers one request on each connection.
type Server struct {
	listener *net.UnixListener
	handler  Handler
	logger   *slog.Logger
	ctx      context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup

	mu      sync.Mutex
	conns   map[*net.UnixConn]bool
	perUser map[int]int
}

// NewServer makes a server that owns the listener.
func NewServer(listener *net.UnixListener, handler Handler, logger *slog.Logger) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	return &Server{listener: listener, handler: handler, logger: logger, ctx: ctx, cancel: cancel, conns: map[*net.UnixConn]bool{},
		perUser: map[int]int{}}
}

// Serve serves until Close is called, and then returns nil.
func (s *Server) Serve() error {
	for {
		conn, err := s.listener.AcceptUnix()
		switch {
		case err == nil:
			s.start(conn)
		case s.ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ECONNABORTED):
			s.logger.Error("descriptor server: accept failed", "err", err)
			select { // nothing signals that a descriptor is free
			case <-time.After(100 * time.Millisecond):
			case <-s.ctx.Done():
			}
		default:
			return err
		}
	}
}

// Close closes the listener and all connections, cancels the contexts of running handlers, and waits for the handlers.
func (s *Server) Close() error {
	s.cancel()
	err := s.listener.Close()
	s.mu.Lock()
	for conn := range s.conns {
		conn.Close()
	}
	s.mu.Unlock()
	s.running.Wait()
	if errors.Is(err, net.ErrClosed) { // Close was called before
		return nil
	}
	return err
}

// start serves a connection in a goroutine. If the client's user has too many connections already, start closes the
// connection instead.
func (s *Server) start(conn *net.UnixConn) {
	peer, err := PeerOf(conn)
	if err == nil {
		err = s.admit(conn, peer)
	}
	if err != nil {
		s.logger.Warn("descriptor server: connection refused", "err", err)
		conn.Close()
		return
	}
	go func() {
		defer s.release(conn, peer)
		if err := s.serve(conn, peer); err != nil {
			s.logger.Warn("descriptor server: request failed", "pid", peer.PID, "uid", peer.UID, "err", err)
		}
	}()
}

// admit registers a connection. After Close, it refuses all connections.
func (s *Server) admit(conn *net.UnixConn, peer Peer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if peer.UID != 0 && s.perUser[peer.UID] >= maxPerUser {
		return fmt.Errorf("user %d already has %d connections", peer.UID, maxPerUser)
	}
	if s.ctx.Err() != nil {
		return net.ErrClosed
	}
	s.perUser[peer.UID]++
	s.conns[conn] = true
	s.running.Add(1)
	return nil
}

func (s *Server) release(conn *net.UnixConn, peer Peer) {
	defer s.running.Done()
	conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
	if s.perUser[peer.UID]--; s.perUser[peer.UID] == 0 {
		delete(s.perUser, peer.UID)
	}
}

// serve handles the request of a connection. It also returns the handler's error, for the log.
func (s *Server) serve(conn *net.UnixConn, peer Peer) error {
	_ = conn.SetReadDeadline(time.Now().Add(requestTimeout))
	r := NewReader(conn, MaxRequest)
	defer r.Close()
	f, err := r.Next()
	if err != nil {
		return err
	}
	f.Close() // requests have no files
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	_ = conn.SetReadDeadline(time.Time{})
	watched := make(chan struct{})
	go func() { // the client sends nothing more, so any input or EOF ends the request
		defer close(watched)
		defer cancel()
		f, _ := r.Next()
		f.Close()
	}()
	answer, failure := s.handler(ctx, peer, f.Payload)
	err = sendReply(conn, answer, failure)
	conn.Close()
	<-watched
	return errors.Join(failure, err)
}

// sendReply sends a reply or a failure, and closes the reply's files.
func sendReply(conn *net.UnixConn, answer Reply, failure error) error {
	defer CloseFiles(answer.Files)
	var m reply
	files := answer.Files
	if failure == nil {
		m.Body, failure = json.Marshal(answer.Body)
	}
	if failure != nil {
		m.Error, files = ToWire(failure), nil
	}
	payload, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_ = conn.SetWriteDeadline(time.Now().Add(replyTimeout))
	return Write(conn, MaxReply, payload, files)
}

// Call sends a request over conn, decodes the reply's body into answer, and closes conn. The caller must close the
// returned files. An error from the server is an *Error. If there is no reply before ctx ends, the error is
// errdefs.ErrUnavailable.
func Call(ctx context.Context, conn *net.UnixConn, request, answer any) ([]*os.File, error) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	payload, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	if err := Write(conn, MaxRequest, payload, nil); err != nil {
		if errors.Is(err, ErrFrame) {
			return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
		}
		return nil, fmt.Errorf("request descriptors: %w: %w", err, errdefs.ErrUnavailable)
	}
	r := NewReader(conn, MaxReply)
	defer r.Close()
	f, err := r.Next()
	if err != nil {
		return nil, fmt.Errorf("no reply to a request for descriptors: %w: %w", errors.Join(context.Cause(ctx), err), errdefs.ErrUnavailable)
	}
	var m reply
	if err := json.Unmarshal(f.Payload, &m); err == nil && m.Error == nil {
		err = json.Unmarshal(m.Body, answer)
		if err == nil {
			return f.Files, nil
		}
	}
	f.Close()
	if m.Error != nil {
		return nil, m.Error
	}
	return nil, fmt.Errorf("%w: the reply has an unknown form: %w", ErrFrame, errdefs.ErrInternal)
}
