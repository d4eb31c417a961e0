package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"crypto/tls"

	"github.com/containerd/errdefs"
	"golang.org/x/time/rate"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// Config is what a Server is made of.
type Config struct {
	// Handler answers every request: NewGRPC's or NewHTTP's.
	Handler http.Handler
	// TLS holds the certificate for the TLS and QUIC sockets; may be nil where there are none.
	TLS *TLS
	// Name is that of the server in the figures of Group, which counts its connections; a Group of its own by default.
	Name  string
	Group *connlimit.Group
	// Connections bounds the TCP connections and, apart from them, the QUIC connections.
	Connections connlimit.Config
	// AltSvcPort is the UDP port that Alt-Svc advertises; by default that of the QUIC socket.
	AltSvcPort int
	// Logger takes failed handshakes, ten a second at most; slog.Default() by default.
	Logger *slog.Logger
}

// Sockets are the bound sockets of a pod; each may be nil. The Server closes them.
type Sockets struct {
	// TLS takes HTTP/2 and HTTP/1.1 over TLS.
	TLS net.Listener
	// QUIC takes HTTP/3.
	QUIC *net.UDPConn
	// Cleartext takes HTTP/2 with prior knowledge (h2c) and HTTP/1.1.
	Cleartext net.Listener
}

// Stats counts what a Server has open.
type Stats struct {
	Connections     int
	QUICConnections int
	Requests        int64
	// Rejected counts the connections that were refused or closed early, by connlimit's reasons.
	Rejected map[string]uint64
}

// Server serves one pod's sockets. What a pod without clients does not need is made when the first one comes.
type Server struct {
	Config
	http   *http.Server
	quic   *quicServer // nil without a QUIC socket
	altSvc []string
	log    *throttledLog

	tcp, udp *connlimit.Limiter
	requests atomic.Int64
	serving  sync.WaitGroup // goroutines that serve sockets
}

const (
	// maxStreams bounds the requests of one connection that are under way at a time.
	maxStreams = 250
	// pingAfter is how long a connection is silent before its peer is asked for a sign, and goneAfter when a peer without
	// one is taken for gone.
	pingAfter = 30 * time.Second
	goneAfter = 45 * time.Second
	// linger is how long a drain leaves connections open whose requests have ended: for responses on their way, and
	// for clients to close on GOAWAY.
	linger = 250 * time.Millisecond
)

// NewServer makes a Server; errdefs.ErrInvalidArgument when there is nothing to answer requests.
func NewServer(c Config) (*Server, error) {
	if c.Handler == nil {
		return nil, fmt.Errorf("a data plane server needs a Handler: %w", errdefs.ErrInvalidArgument)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Group == nil {
		c.Group = connlimit.NewGroup(c.Logger)
	}
	s := &Server{Config: c, log: &throttledLog{Handler: c.Logger.Handler(), limit: rate.NewLimiter(10, 20)}}
	s.tcp, s.udp = c.Group.Limiter(c.Name, c.Connections), c.Group.Limiter(c.Name+"/quic", c.Connections)
	s.http = s.newHTTP()
	return s, nil
}

// newHTTP makes the server of both kinds of TCP sockets.
func (s *Server) newHTTP() *http.Server {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	server := s.tcp.HTTPServer(http.HandlerFunc(s.serveHTTP))
	server.Protocols = protocols
	server.HTTP2 = &http.HTTP2Config{
		MaxConcurrentStreams: maxStreams,
		// What a client may send ahead of a reader, as for QUIC.
		MaxReceiveBufferPerStream:     streamWindow,
		MaxReceiveBufferPerConnection: connectionWindow,
		SendPingTimeout:               pingAfter,
		PingTimeout:                   goneAfter - pingAfter,
	}
	server.ErrorLog = slog.NewLogLogger(s.log, slog.LevelWarn)
	return server
}

// Start serves the sockets until Shutdown or Close, in goroutines of its own. It is called once.
// TLS and QUIC sockets need Config.TLS: errdefs.ErrInvalidArgument.
func (s *Server) Start(sockets Sockets) error {
	if s.TLS == nil && (sockets.TLS != nil || sockets.QUIC != nil) {
		return fmt.Errorf("sockets for TLS and QUIC need a certificate: %w", errdefs.ErrInvalidArgument)
	}
	if sockets.QUIC != nil {
		port := s.AltSvcPort
		if port == 0 {
			port = sockets.QUIC.LocalAddr().(*net.UDPAddr).Port
		}
		s.altSvc = []string{`h3=":` + strconv.Itoa(port) + `"; ma=86400`}
		s.quic = newQUICServer(s, sockets.QUIC)
		s.serving.Go(s.quic.serve)
	}
	if sockets.TLS != nil {
		s.serveTCP(tls.NewListener(s.tcp.Listener(sockets.TLS), s.TLS.config("h2", "http/1.1")))
	}
	if sockets.Cleartext != nil {
		s.serveTCP(s.tcp.Listener(sockets.Cleartext))
	}
	return nil
}

func (s *Server) serveTCP(ln net.Listener) {
	s.serving.Go(func() {
		if err := s.http.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			s.Logger.Error("a socket is served no more", "address", ln.Addr().String(), "err", err)
		}
	})
}

// serveHTTP is where requests of all protocols meet.
func (s *Server) serveHTTP(w http.ResponseWriter, r *http.Request) {
	s.requests.Add(1)
	defer s.requests.Add(-1)
	if r.TLS != nil && r.ProtoMajor < 3 && s.altSvc != nil {
		w.Header()["Alt-Svc"] = s.altSvc
	}
	s.Handler.ServeHTTP(w, r)
}

// Stats tells what is open now.
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

// Shutdown accepts no more connections, sends GOAWAY on those there are, waits for the requests under way and closes.
// At the end of ctx it closes what is left as Close does, and returns ctx's error.
func (s *Server) Shutdown(ctx context.Context) error {
	drain, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var wg sync.WaitGroup
		wg.Go(func() { _ = s.http.Shutdown(drain) }) // its errors are those of listeners that are closed already
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

// awaitDrain waits for clients to have closed, or for the requests to have ended and linger to have passed.
func (s *Server) awaitDrain(ctx context.Context, done <-chan struct{}) error {
	// Counting requests down takes no lock, so their end is looked for.
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	var idleSince time.Time
	for {
		select {
		case <-done:
			if s.requests.Load() == 0 {
				return nil
			}
			return ctx.Err() // which is why they are done
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

// Close closes sockets and connections at once. Requests under way see their context end.
func (s *Server) Close() error {
	err := s.http.Close()
	if s.quic != nil {
		s.quic.close()
	}
	s.serving.Wait()
	s.tcp.Close()
	s.udp.Close()
	return err
}

// throttledLog is a slog.Handler that lets floods of refusals not become floods of lines.
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
