package dataplane

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/net/http2"
	"golang.org/x/time/rate"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// Config configures a Server.
type Config struct {
	// Handler serves all requests. It is from NewGRPC or NewHTTP.
	Handler http.Handler
	// TLS is the TLS configuration of the TLS and QUIC sockets, or nil if there are none.
	TLS *TLS
	// Name is the server's name in Group, which counts the connections. By default, the server has its own Group.
	Name  string
	Group *connlimit.Group
	// Connections limits the TCP connections and, separately, the QUIC connections.
	Connections connlimit.Config
	// Logger gets errors, including failed handshakes (at most ten per second); slog.Default() by default.
	Logger *slog.Logger
}

// Sockets are the bound sockets of a pod. Each can be nil. The Server closes them.
type Sockets struct {
	TLS       net.Listener // HTTP/2 and HTTP/1.1 over TLS
	QUIC      *net.UDPConn // HTTP/3
	Cleartext net.Listener // HTTP/2 with prior knowledge (h2c), and HTTP/1.1
}

// Close closes the sockets.
func (s Sockets) Close() {
	if s.TLS != nil {
		s.TLS.Close()
	}
	if s.QUIC != nil {
		s.QUIC.Close()
	}
	if s.Cleartext != nil {
		s.Cleartext.Close()
	}
}

// Stats are a Server's open connections and requests.
type Stats struct {
	Connections     int
	QUICConnections int
	Requests        int64
	// Rejected counts refused and forcibly closed connections by reason (a constant of package connlimit).
	Rejected map[string]uint64
}

// Server serves one pod's sockets.
type Server struct {
	Config
	web    *tcpServer
	quic   *quicServer // nil without a QUIC socket
	altSvc []string
	log    *throttledLog

	tcp, udp *connlimit.Limiter
	requests atomic.Int64
	serving  sync.WaitGroup // goroutines that serve sockets
}

const (
	// maxStreams bounds the concurrent requests of one connection.
	maxStreams = 250
	// A connection's peer is pinged after pingAfter of silence, and considered gone after goneAfter.
	pingAfter = 30 * time.Second
	goneAfter = 45 * time.Second
	// stuckTime is how long a client can read nothing from an HTTP/2 connection while there are bytes for it. The pings
	// do not find a client that still sends. QUIC needs no limit, because a stream can end while its writer waits.
	stuckTime = 15 * time.Second
	// linger is how long a drain keeps connections open after the last request, to deliver responses and to let clients
	// react to GOAWAY.
	linger = 250 * time.Millisecond
)

// NewServer returns a Server. It returns errdefs.ErrInvalidArgument if there is no Handler.
func NewServer(c Config) (*Server, error) {
	if c.Handler == nil {
		return nil, fmt.Errorf("a data plane server needs a Handler: %w", errdefs.ErrInvalidArgument)
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Group == nil {
		c.Group = connlimit.NewGroup(c.Logger)
	}
	s := &Server{Config: c, log: &throttledLog{Handler: c.Logger.Handler(), limit: rate.NewLimiter(10, 20)}}
	s.tcp, s.udp = c.Group.Limiter(c.Name, c.Connections), c.Group.Limiter(c.Name+"/quic", c.Connections)
	s.web = newTCPServer(s)
	return s, nil
}

// Start serves the sockets in the background until Shutdown or Close is called. Call Start only once. It returns
// errdefs.ErrInvalidArgument if there is a TLS or QUIC socket but no Config.TLS.
func (s *Server) Start(sockets Sockets) error {
	if s.TLS == nil && (sockets.TLS != nil || sockets.QUIC != nil) {
		return fmt.Errorf("sockets for TLS and QUIC need a certificate: %w", errdefs.ErrInvalidArgument)
	}
	if sockets.QUIC != nil {
		port := sockets.QUIC.LocalAddr().(*net.UDPAddr).Port
		s.altSvc = []string{`h3=":` + strconv.Itoa(port) + `"; ma=86400`}
		s.quic = newQUICServer(s, sockets.QUIC)
		s.serving.Go(s.quic.serve)
	}
	if sockets.TLS != nil {
		s.serving.Go(func() { s.web.serve(s.tcp.Listener(sockets.TLS), s.TLS.config(http2.NextProtoTLS, "http/1.1")) })
	}
	if sockets.Cleartext != nil {
		s.serving.Go(func() { s.web.serve(s.tcp.Listener(sockets.Cleartext), nil) })
	}
	return nil
}

// serveHTTP serves the requests of all protocols.
func (s *Server) serveHTTP(w http.ResponseWriter, r *http.Request) {
	s.requests.Add(1)
	defer s.requests.Add(-1)
	if r.TLS != nil && r.ProtoMajor < 3 && s.altSvc != nil && isDirect(r) {
		w.Header()["Alt-Svc"] = s.altSvc
	}
	s.Handler.ServeHTTP(w, r)
}

// isDirect reports whether the client knows the server by the port of its socket. Behind a host port or a Service with
// another one, the port of the QUIC socket means nothing to the client.
func isDirect(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	_, port, _ := net.SplitHostPort(r.Host) // fails if there is no port
	return ok && cmp.Or(port, "443") == strconv.Itoa(local.Port)
}

// Stats returns the current statistics.
func (s *Server) Stats() Stats {
	tcp, udp := s.tcp.Stats(), s.udp.Stats()
	rejected := map[string]uint64{}
	for _, counts := range []map[string]uint64{tcp.Rejected, udp.Rejected} {
		for reason, n := range counts {
			rejected[reason] += n
		}
	}
	return Stats{Connections: tcp.Open, QUICConnections: udp.Open, Requests: s.requests.Load(), Rejected: rejected}
}

// Shutdown stops accepting connections, sends GOAWAY on the open ones, waits for the requests in progress and then
// closes the server. If ctx ends first, Shutdown closes the server immediately and returns ctx's error.
func (s *Server) Shutdown(ctx context.Context) error {
	drain, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var wg sync.WaitGroup
		wg.Go(func() { s.web.shutdown(drain) })
		if s.quic != nil {
			wg.Go(func() { s.quic.shutdown(drain) })
		}
		wg.Wait()
	}()
	err := s.awaitDrain(ctx, done)
	cancel()
	s.Close()
	return err
}

// awaitDrain waits until the clients have disconnected, or until no request has been in progress for the duration
// linger.
func (s *Server) awaitDrain(ctx context.Context, done <-chan struct{}) error {
	// The request counter is lock-free, so nothing signals when it reaches zero.
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	var idleSince time.Time
	for {
		select {
		case <-done:
			if s.requests.Load() == 0 {
				return nil
			}
			return ctx.Err() // the end of ctx also closes done
		case <-ctx.Done():
			return ctx.Err()
		case now := <-poll.C:
			switch {
			case s.requests.Load() > 0:
				idleSince = time.Time{}
			case idleSince.IsZero():
				idleSince = now
			case now.Sub(idleSince) > linger:
				return nil
			}
		}
	}
}

// Close closes sockets and connections immediately. It ends the contexts of the requests in progress.
func (s *Server) Close() error {
	s.web.close()
	if s.quic != nil {
		s.quic.close()
	}
	s.serving.Wait()
	s.tcp.Close()
	s.udp.Close()
	return nil
}

// throttledLog is a slog.Handler that drops records over a rate limit.
type throttledLog struct {
	slog.Handler
	limit *rate.Limiter
}

// Handle implements slog.Handler.
func (l *throttledLog) Handle(ctx context.Context, r slog.Record) error {
	if !l.limit.Allow() {
		return nil
	}
	return l.Handler.Handle(ctx, r)
}

func (l *throttledLog) warn(message string, args ...any) { slog.New(l).Warn(message, args...) }
