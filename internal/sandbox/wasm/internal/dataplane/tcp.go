package dataplane

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/h2"
)

// tcpServer serves TCP sockets: it finds out which version of HTTP a connection speaks, and hands it over.
type tcpServer struct {
	server *Server
	http1  *http.Server
	http2  *h2.Server

	serveHTTP1 func() // serves handover; the first connection of HTTP/1.1 calls it
	handover   *handover

	mu        sync.Mutex
	listeners []net.Listener
	fresh     map[net.Conn]struct{} // connections whose version is not known yet
	closed    bool
}

func newTCPServer(s *Server) *tcpServer {
	handler := http.HandlerFunc(s.serveHTTP)
	t := &tcpServer{server: s, http1: s.tcp.HTTPServer(handler), handover: newHandover(), fresh: map[net.Conn]struct{}{}}
	t.http1.Protocols = &http.Protocols{}
	t.http1.Protocols.SetHTTP1(true)
	t.http1.ErrorLog = slog.NewLogLogger(s.log, slog.LevelWarn)
	t.serveHTTP1 = sync.OnceFunc(func() { go func() { _ = t.http1.Serve(t.handover) }() }) // fails only at its end
	t.http2 = h2.NewServer(h2.Config{
		Handler:        connlimit.Handler(handler),
		TooLarge:       connlimit.Handler(http.HandlerFunc(headerTooLarge)),
		MaxStreams:     maxStreams,
		StreamWindow:   streamWindow, // these bound the unread bytes that a client can send, as for QUIC
		ConnWindow:     connectionWindow,
		MaxHeaderBytes: s.tcp.MaxHeaderBytes,
		PrefaceTimeout: s.tcp.HeaderTimeout,
		IdleTimeout:    s.tcp.IdleTimeout,
		PingAfter:      pingAfter,
		GoneAfter:      goneAfter,
		StuckTime:      stuckTime,
		Logger:         s.Logger,
	})
	return t
}

// serve accepts connections until close. config is nil for a cleartext socket.
func (t *tcpServer) serve(ln net.Listener, config *tls.Config) {
	t.mu.Lock()
	t.listeners = append(t.listeners, ln)
	closed := t.closed
	t.mu.Unlock()
	if closed {
		ln.Close()
	}
	for {
		conn, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			t.server.log.warn("accept failed", "address", ln.Addr().String(), "err", err)
			time.Sleep(acceptPause) // pacing: the error, such as too many open files, can last
			continue
		}
		go t.serveConn(conn, config)
	}
}

// acceptPause is the time between attempts to accept a connection.
const acceptPause = 50 * time.Millisecond

// serveConn hands a new connection over. The client has to show its version of HTTP in time.
func (t *tcpServer) serveConn(conn net.Conn, config *tls.Config) {
	if !t.begin(conn) {
		conn.Close()
		return
	}
	_ = conn.SetDeadline(time.Now().Add(t.server.tcp.HeaderTimeout)) // fails if the connection has ended
	ctx := connlimit.WithConn(context.Background(), connlimit.Of(conn))
	if config == nil {
		prefix, isHTTP2, err := sniff(conn)
		t.hand(ctx, conn, &sniffedConn{conn, prefix}, nil, isHTTP2, err)
		return
	}
	secure := tls.Server(conn, config)
	err := secure.HandshakeContext(ctx)
	if err != nil {
		t.server.log.warn("TLS handshake failed", "peer", conn.RemoteAddr().String(), "err", err)
		answerPlain(err)
	}
	state := secure.ConnectionState()
	t.hand(ctx, conn, secure, &state, state.NegotiatedProtocol == http2.NextProtoTLS, err)
}

// begin counts a connection as fresh. It returns false if the server is closed.
func (t *tcpServer) begin(conn net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.fresh[conn] = struct{}{}
	}
	return !t.closed
}

// hand hands a connection, and what is above it, to the server of its version. If there was an error, it closes it.
func (t *tcpServer) hand(ctx context.Context, conn, above net.Conn, state *tls.ConnectionState, isHTTP2 bool, err error) {
	t.mu.Lock()
	delete(t.fresh, conn)
	closed := t.closed
	t.mu.Unlock()
	switch {
	case err != nil || closed:
		conn.Close()
	case isHTTP2:
		t.http2.Serve(ctx, above, state)
	default:
		_ = conn.SetDeadline(time.Time{}) // fails if the connection has ended
		t.serveHTTP1()
		t.handover.put(above)
	}
}

// sniff reads until it is known whether a client speaks HTTP/2, and returns what it has read. If the first line is neither
// a request line of HTTP/1 nor the preface of HTTP/2, the client gets an error of HTTP/2 (RFC 9113, 3.4).
func sniff(conn net.Conn) (prefix []byte, isHTTP2 bool, err error) {
	b := make([]byte, 0, 64)
	for len(b) < len(http2.ClientPreface) {
		n, err := conn.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if !strings.HasPrefix(http2.ClientPreface, string(b[:min(len(b), len(http2.ClientPreface))])) {
			line, _, whole := strings.Cut(string(b), "\n")
			return b, whole && !strings.Contains(line, " HTTP/"), nil
		}
		if err != nil {
			return nil, false, err
		}
	}
	return b, true, nil
}

// answerPlain answers a client that speaks HTTP without TLS to a socket with TLS.
func answerPlain(err error) {
	broken, ok := errors.AsType[tls.RecordHeaderError](err)
	if !ok || broken.Conn == nil {
		return
	}
	switch string(broken.RecordHeader[:]) {
	case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO":
		_, _ = io.WriteString(broken.Conn, "HTTP/1.0 400 Bad Request\r\n\r\nThis port needs HTTPS.\n") // fails if the client is gone
	}
}

// headerTooLarge answers a request whose header is too large, in the way of its protocol.
func headerTooLarge(w http.ResponseWriter, r *http.Request) {
	const message = "the request's header is too large"
	if media := MediaType(r.Header); IsGRPCFamily(media) {
		w.Header()["Content-Type"] = []string{media}
		Errorf(codes.ResourceExhausted, message).addTo(w.Header(), "")
		return
	}
	http.Error(w, message, http.StatusRequestHeaderFieldsTooLarge)
}

// shutdown stops accepting connections, and waits until the requests in progress have ended or ctx ends.
func (t *tcpServer) shutdown(ctx context.Context) {
	t.stopAccepting()
	var wg sync.WaitGroup
	wg.Go(func() { _ = t.http1.Shutdown(ctx) }) // returns only ctx's error, or errors from closing listeners
	wg.Go(func() { _ = t.http2.Shutdown(ctx) })
	wg.Wait()
}

func (t *tcpServer) stopAccepting() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, ln := range t.listeners {
		ln.Close()
	}
	for conn := range t.fresh {
		conn.Close()
	}
}

// close closes sockets and connections.
func (t *tcpServer) close() {
	t.stopAccepting()
	_ = t.http1.Close()
	t.handover.Close()
	t.http2.Close()
}

// handover is the listener of connections that are known to speak HTTP/1.1.
type handover struct {
	conns  chan net.Conn
	closed chan struct{}
	close  func()
}

func newHandover() *handover {
	h := &handover{conns: make(chan net.Conn), closed: make(chan struct{})}
	h.close = sync.OnceFunc(func() { close(h.closed) })
	return h
}

func (h *handover) put(conn net.Conn) {
	select {
	case h.conns <- conn:
	case <-h.closed:
		conn.Close()
	}
}

// Accept implements net.Listener.
func (h *handover) Accept() (net.Conn, error) {
	select {
	case conn := <-h.conns:
		return conn, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *handover) Close() error {
	h.close()
	return nil
}

// Addr implements net.Listener. The connections come from several sockets.
func (h *handover) Addr() net.Addr { return &net.TCPAddr{} }

// sniffedConn is a connection of which a prefix has been read.
type sniffedConn struct {
	net.Conn
	prefix []byte
}

// Read implements net.Conn.
func (c *sniffedConn) Read(p []byte) (int, error) {
	if len(c.prefix) == 0 {
		return c.Conn.Read(p)
	}
	n := copy(p, c.prefix)
	c.prefix = c.prefix[n:]
	return n, nil
}

// CloseWrite calls the underlying connection's CloseWrite.
func (c *sniffedConn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// NetConn returns the underlying connection, like the method of tls.Conn.
func (c *sniffedConn) NetConn() net.Conn { return c.Conn }
