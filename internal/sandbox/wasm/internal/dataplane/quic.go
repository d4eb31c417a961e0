package dataplane

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// quicServer serves HTTP/3 on one UDP socket. Until the first packet arrives, it has only one goroutine.
type quicServer struct {
	server *Server
	conn   *net.UDPConn

	mu        sync.Mutex // guards the field closed and the fields that listen sets
	closed    bool
	transport *quic.Transport
	listener  *quic.Listener
	http      *http3.Server
	accepted  chan struct{} // closed when serve returns

	handshakes atomic.Int64
}

const (
	// handshakesUnverified is how many handshakes can be in progress before new clients must prove their address (RFC
	// 9000, 8.1.2). From then on, a flood from forged addresses costs only one datagram per handshake, and no state.
	handshakesUnverified = 16
	// The windows bound the unread bytes that a peer can send, per stream and per connection.
	streamWindow     = 1 << 20
	connectionWindow = 4 << 20
)

func newQUICServer(s *Server, conn *net.UDPConn) *quicServer {
	return &quicServer{server: s, conn: conn, accepted: make(chan struct{})}
}

// serve waits for the first packet, and then accepts connections until shutdown or close.
func (q *quicServer) serve() {
	defer close(q.accepted)
	if err := awaitPacket(q.conn); err != nil {
		return // closed
	}
	if err := q.listen(); err != nil {
		q.server.Logger.Error("serve HTTP/3 failed", "address", q.conn.LocalAddr().String(), "err", err)
		return
	}
	if q.http == nil {
		return // closed in the meantime
	}
	if err := q.http.ServeListener(quicListener{q.listener, q}); !errors.Is(err, http.ErrServerClosed) {
		q.server.Logger.Error("serve HTTP/3 failed", "address", q.conn.LocalAddr().String(), "err", err)
	}
}

// awaitPacket waits for a packet without reading it.
func awaitPacket(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var b [1]byte
	return raw.Read(func(fd uintptr) (readable bool) {
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return err != unix.EAGAIN && err != unix.EINTR
	})
}

func (q *quicServer) listen() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return nil
	}
	transport := &quic.Transport{
		Conn:                q.conn,
		VerifySourceAddress: func(net.Addr) bool { return q.handshakes.Load() >= handshakesUnverified },
		ConnContext:         q.admit,
	}
	// Listen, unlike ListenEarly, returns connections only after the client is authenticated.
	listener, err := transport.Listen(q.server.TLS.config(http3.NextProtoH3), &quic.Config{
		HandshakeIdleTimeout:           q.server.udp.HeaderTimeout / 2, // quic-go allows twice as long for the whole handshake
		MaxIdleTimeout:                 goneAfter,                      // for silent peers; http3.Server's IdleTimeout ends idle connections
		KeepAlivePeriod:                pingAfter,                      // quic-go uses at most half of goneAfter
		MaxIncomingStreams:             maxStreams,
		MaxIncomingUniStreams:          8, // HTTP/3 uses three; clients can add streams of reserved types (grease)
		MaxStreamReceiveWindow:         streamWindow,
		MaxConnectionReceiveWindow:     connectionWindow,
		InitialStreamReceiveWindow:     streamWindow / 4,
		InitialConnectionReceiveWindow: streamWindow / 2,
	})
	if err != nil {
		return err
	}
	q.transport, q.listener = transport, listener
	q.http = &http3.Server{
		Handler:        connlimit.Handler(http.HandlerFunc(q.server.serveHTTP)),
		ConnContext:    entryContext,
		MaxHeaderBytes: q.server.udp.MaxHeaderBytes,
		IdleTimeout:    q.server.udp.IdleTimeout,
		Logger:         q.server.Logger,
	}
	return nil
}

// connection is the state of a QUIC connection from its first packet to its end.
type connection struct {
	entry       *connlimit.Conn
	established atomic.Bool
}

type connectionKey struct{}

// admit counts a new connection or refuses it. quic-go calls admit before it allocates state for the connection.
func (q *quicServer) admit(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
	entry, err := q.server.udp.Admit(info.RemoteAddr, nil) // nil: quic-go times handshakes out by itself
	if err != nil {
		return nil, err
	}
	q.handshakes.Add(1)
	c := &connection{entry: entry}
	context.AfterFunc(ctx, func() {
		entry.Leave()
		if q.endHandshake(c) {
			q.server.log.warn("QUIC handshake failed", "peer", info.RemoteAddr.String(), "err", context.Cause(ctx))
		}
	})
	return context.WithValue(ctx, connectionKey{}, c), nil
}

// endHandshake marks a connection as established. It returns true on the first call for the connection.
func (q *quicServer) endHandshake(c *connection) bool {
	first := c.established.CompareAndSwap(false, true)
	if first {
		q.handshakes.Add(-1)
	}
	return first
}

// quicListener marks accepted connections as established and lets connlimit close them.
type quicListener struct {
	*quic.Listener
	server *quicServer
}

// Accept implements http3.QUICListener.
func (l quicListener) Accept(ctx context.Context) (*quic.Conn, error) {
	conn, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	c := conn.Context().Value(connectionKey{}).(*connection)
	l.server.endHandshake(c)
	c.entry.Closable(func() {
		_ = conn.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeExcessiveLoad), "too many connections")
	})
	return conn, nil
}

// entryContext adds the connection's connlimit entry to the context of its requests.
func entryContext(ctx context.Context, conn *quic.Conn) context.Context {
	return connlimit.WithConn(ctx, conn.Context().Value(connectionKey{}).(*connection).entry)
}

// shutdown sends GOAWAY and waits until the clients have disconnected or ctx ends.
func (q *quicServer) shutdown(ctx context.Context) {
	q.mu.Lock()
	q.closed = true
	if q.http == nil {
		q.conn.Close() // ends awaitPacket
		q.mu.Unlock()
		<-q.accepted
		return
	}
	q.mu.Unlock()
	// http3.Server miscounts connections that arrive while it shuts down, so stop accepting first.
	q.listener.Close()
	<-q.accepted
	_ = q.http.Shutdown(ctx) // returns only ctx's error, which the caller checks
}

// close closes all connections and the socket immediately.
func (q *quicServer) close() {
	q.mu.Lock()
	q.closed = true
	if q.http != nil {
		q.listener.Close()
	}
	q.mu.Unlock()
	if q.http != nil {
		// Close runs in the background, because it waits for the handlers, and a component can block its handler.
		go q.http.Close()
		q.transport.Close()
	}
	q.conn.Close()
}
