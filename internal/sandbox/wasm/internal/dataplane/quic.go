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

// quicServer serves HTTP/3 on one UDP socket. Until the first packet comes there is a goroutine and nothing else.
type quicServer struct {
	server *Server
	conn   *net.UDPConn

	mu        sync.Mutex // guards what the first packet makes, and closed
	closed    bool
	transport *quic.Transport
	listener  *quic.Listener
	http      *http3.Server
	accepted  chan struct{} // closed when no connection is accepted any more

	handshakes atomic.Int64
}

const (
	// handshakesUnverified is how many handshakes may be under way before clients have to prove their address
	// (RFC 9000, 8.1.2), so that a flood of forged ones costs a datagram each and no state.
	handshakesUnverified = 16
	// The windows bound what a peer may send ahead of a reader: per stream, and over all streams of a connection.
	streamWindow     = 1 << 20
	connectionWindow = 4 << 20
)

func newQUICServer(s *Server, conn *net.UDPConn) *quicServer {
	return &quicServer{server: s, conn: conn, accepted: make(chan struct{})}
}

// serve waits for the first packet and then for the end of all connections' being accepted.
func (q *quicServer) serve() {
	defer close(q.accepted)
	if err := awaitPacket(q.conn); err != nil {
		return // closed
	}
	if err := q.listen(); err != nil {
		q.server.Logger.Error("HTTP/3 is not served", "address", q.conn.LocalAddr().String(), "err", err)
		return
	}
	if q.http == nil {
		return // closed in the meantime
	}
	if err := q.http.ServeListener(established{q.listener, q}); !errors.Is(err, http.ErrServerClosed) {
		q.server.Logger.Error("a socket is served no more", "address", q.conn.LocalAddr().String(), "err", err)
	}
}

// awaitPacket returns when a packet lies in the socket, which it leaves there.
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
	// Not ListenEarly: connections count, and are served, once the client has proved who it is.
	listener, err := transport.Listen(q.server.TLS.config(http3.NextProtoH3), &quic.Config{
		HandshakeIdleTimeout:           q.server.udp.HeaderTimeout / 2, // quic-go allows twice that for the whole handshake
		MaxIdleTimeout:                 goneAfter,                      // http3.Server's IdleTimeout ends those that are merely idle
		KeepAlivePeriod:                pingAfter,                      // quic-go takes half of goneAfter
		MaxIncomingStreams:             maxStreams,
		MaxIncomingUniStreams:          8, // HTTP/3 has three, and clients may grease
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

// connection is a QUIC connection from its first packet to its end.
type connection struct {
	entry *connlimit.Conn
	over  atomic.Bool // the handshake is
}

type connectionKey struct{}

// admit counts a new connection, or refuses it. It is called before any work is done for it.
func (q *quicServer) admit(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
	entry, err := q.server.udp.Admit(info.RemoteAddr, nil) // quic-go ends handshakes itself
	if err != nil {
		return nil, err
	}
	q.handshakes.Add(1)
	c := &connection{entry: entry}
	context.AfterFunc(ctx, func() {
		entry.Leave()
		if q.established(c) {
			q.server.log.warn("QUIC handshake failed", "peer", info.RemoteAddr.String(), "err", context.Cause(ctx))
		}
	})
	return context.WithValue(ctx, connectionKey{}, c), nil
}

// established ends the handshake of a connection; the first call returns true.
func (q *quicServer) established(c *connection) bool {
	first := c.over.CompareAndSwap(false, true)
	if first {
		q.handshakes.Add(-1)
	}
	return first
}

// established is the listener that tells admit which handshakes have succeeded.
type established struct {
	*quic.Listener
	server *quicServer
}

// Accept implements http3.QUICListener.
func (l established) Accept(ctx context.Context) (*quic.Conn, error) {
	conn, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	c := conn.Context().Value(connectionKey{}).(*connection)
	l.server.established(c)
	c.entry.Closable(func() {
		_ = conn.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeExcessiveLoad), "too many connections")
	})
	return conn, nil
}

// entryContext gives requests the entry of their connection.
func entryContext(ctx context.Context, conn *quic.Conn) context.Context {
	return connlimit.WithConn(ctx, conn.Context().Value(connectionKey{}).(*connection).entry)
}

// shutdown sends GOAWAY and waits for the clients to close, or the end of ctx.
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
	// http3.Server miscounts connections that come in while it shuts down, so there must be none.
	q.listener.Close()
	<-q.accepted
	_ = q.http.Shutdown(ctx) // ctx's error, which the caller has
}

// close ends everything at once.
func (q *quicServer) close() {
	q.mu.Lock()
	q.closed = true
	if q.http != nil {
		q.listener.Close()
	}
	q.mu.Unlock()
	if q.http != nil {
		// It waits for handlers, which a component may keep busy for longer than anyone wants to wait.
		go q.http.Close()
		q.transport.Close()
	}
	q.conn.Close()
}
