package h2

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Config configures a Server. All fields but TooLarge are required.
type Config struct {
	Handler http.Handler
	// TooLarge answers requests whose header is over MaxHeaderBytes. They have the fields that were read before that. By
	// default the answer is 431.
	TooLarge http.Handler
	// MaxStreams bounds the concurrent requests of a connection.
	MaxStreams int
	// StreamWindow and ConnWindow bound the unread bytes of a request and of a connection.
	StreamWindow, ConnWindow int
	// MaxHeaderBytes bounds a header, counted as in RFC 9113, 6.5.2.
	MaxHeaderBytes int
	// PrefaceTimeout bounds the wait for the client's preface and settings, and IdleTimeout the time without requests.
	PrefaceTimeout, IdleTimeout time.Duration
	// PingAfter is the silence after which a client is pinged, and GoneAfter that after which it is gone.
	PingAfter, GoneAfter time.Duration
	// StuckTime is how long a client can read nothing while there are bytes for it.
	StuckTime time.Duration
	// Logger gets panics of the Handler.
	Logger *slog.Logger
}

// Server serves HTTP/2 connections.
type Server struct {
	Config
	date    atomic.Pointer[dateText]
	workers workers

	mu       sync.Mutex
	conns    map[*conn]struct{}
	draining bool
	closed   bool
	gone     chan struct{} // closed when a draining Server has no connection left
}

// NewServer returns a Server.
func NewServer(c Config) *Server {
	if c.TooLarge == nil {
		c.TooLarge = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "the header is too large", http.StatusRequestHeaderFieldsTooLarge)
		})
	}
	return &Server{Config: c, conns: map[*conn]struct{}{}, gone: make(chan struct{})}
}

// Serve serves a connection until it ends, and closes it. The client's preface has not been read. The requests' contexts
// are derived from ctx; state is the connection's state of TLS, or nil over cleartext.
func (s *Server) Serve(ctx context.Context, socket net.Conn, state *tls.ConnectionState) {
	ctx, cancel := context.WithCancel(context.WithValue(ctx, http.LocalAddrContextKey, socket.LocalAddr()))
	defer cancel()
	c := newConn(s, ctx, socket, state)
	if !s.add(c) {
		socket.Close()
		return
	}
	defer s.remove(c)
	c.serve()
}

func (s *Server) add(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining || s.closed {
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *Server) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	s.signalGone()
}

// signalGone closes gone if the Server drains and has no connection. s.mu is held.
func (s *Server) signalGone() {
	if !s.draining || len(s.conns) > 0 {
		return
	}
	select {
	case <-s.gone:
	default:
		close(s.gone)
	}
}

// each calls f for each connection, without the lock.
func (s *Server) each(f func(c *conn)) {
	s.mu.Lock()
	conns := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	for _, c := range conns {
		f(c)
	}
}

// Shutdown sends GOAWAY on the open connections, and waits until the requests in progress have ended and the connections
// are closed. New connections are closed. It returns ctx's error if ctx ends first.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	s.signalGone()
	s.mu.Unlock()
	s.each(func(c *conn) { go c.drain() }) // a write can wait for its client
	select {
	case <-s.gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close closes all connections, and ends the contexts of the requests in progress.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.each(func(c *conn) { c.abort(errServerClosed) })
}

// dateText is the Date header of one second.
type dateText struct {
	second int64
	text   string
}

// dateNow returns the value of the Date header.
func (s *Server) dateNow() string {
	now := time.Now()
	if d := s.date.Load(); d != nil && d.second == now.Unix() {
		return d.text
	}
	d := &dateText{now.Unix(), now.UTC().Format(http.TimeFormat)}
	s.date.Store(d)
	return d.text
}
