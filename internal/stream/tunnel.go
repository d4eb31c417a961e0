package stream

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// isTunnel reports whether the client wants to forward ports over SPDY inside of a WebSocket (KEP-4006), as programs with
// client-go do that must pass a proxy.
func isTunnel(r *http.Request) bool {
	return slices.Contains(websocket.Subprotocols(r), portforward.WebsocketsSPDYTunnelingPortForwardV1)
}

// tunnel returns the response and the request of the SPDY session inside of a WebSocket. The upgrade of the response opens the
// WebSocket.
func tunnel(w http.ResponseWriter, r *http.Request) (http.ResponseWriter, *http.Request) {
	inner := r.Clone(r.Context())
	inner.Header = http.Header{}
	inner.Header.Set(httpstream.HeaderConnection, httpstream.HeaderUpgrade)
	inner.Header.Set(httpstream.HeaderUpgrade, spdy.HeaderSpdy31)
	inner.Header.Set(httpstream.HeaderProtocolVersion, portforward.ProtocolV1Name)
	return &tunnelResponse{header: http.Header{}, outer: w, request: r}, inner
}

// tunnelResponse is the response of the SPDY session. Only its upgrade is sent, as that of the WebSocket.
type tunnelResponse struct {
	header  http.Header
	outer   http.ResponseWriter
	request *http.Request
}

func (t *tunnelResponse) Header() http.Header { return t.header }

// WriteHeader sends nothing for the upgrade, because Hijack does.
func (t *tunnelResponse) WriteHeader(code int) {
	if code != http.StatusSwitchingProtocols {
		t.outer.WriteHeader(code)
	}
}

func (t *tunnelResponse) Write(p []byte) (int, error) { return t.outer.Write(p) }

// Hijack opens the WebSocket (http.Hijacker). The connection is the SPDY connection inside of it.
func (t *tunnelResponse) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	upgrader := websocket.Upgrader{
		Subprotocols: []string{portforward.WebsocketsSPDYTunnelingPortForwardV1},
		// A buffer of its own: that of net/http must not be read by two goroutines.
		ReadBufferSize: 32 << 10, WriteBufferSize: 32 << 10,
		CheckOrigin: func(*http.Request) bool { return true }, // the URL's token is the permission
	}
	socket, err := upgrader.Upgrade(t.outer, t.request, nil)
	if err != nil {
		return nil, nil, err // and the client has its answer
	}
	conn := &tunnelConn{Conn: socket}
	return conn, bufio.NewReadWriter(bufio.NewReader(conn), bufio.NewWriter(conn)), nil
}

// tunnelConn is the connection inside of a WebSocket: the content of its binary messages, one after the other.
type tunnelConn struct {
	*websocket.Conn

	mu      sync.Mutex // held while a message is read: a session that is closing reads beside the protocol library
	message io.Reader  // the one that is being read; nil before the first and between two
	end     error      // after it, nothing can be read
}

var _ net.Conn = (*tunnelConn)(nil)

// Read implements io.Reader. A client that closes the WebSocket ends the connection.
func (c *tunnelConn) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.end == nil {
		if c.message == nil {
			if c.message, c.end = c.nextMessage(); c.end != nil {
				break
			}
		}
		n, err := c.message.Read(p)
		if err == io.EOF {
			c.message, err = nil, nil
		}
		c.end = err
		if n > 0 {
			return n, nil
		}
	}
	return 0, c.end
}

func (c *tunnelConn) nextMessage() (io.Reader, error) {
	kind, message, err := c.NextReader()
	switch {
	case websocket.IsCloseError(err, websocket.CloseNormalClosure, websocket.CloseGoingAway):
		return nil, io.EOF
	case err == nil && kind != websocket.BinaryMessage:
		return nil, errors.New("a tunnel carries binary messages only")
	}
	return message, err
}

// Write implements io.Writer.
func (c *tunnelConn) Write(p []byte) (int, error) {
	if err := c.WriteMessage(websocket.BinaryMessage, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// SetDeadline implements net.Conn.
func (c *tunnelConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SyscallConn returns the socket (syscall.Conn), whose state shows whether the client is gone.
func (c *tunnelConn) SyscallConn() (syscall.RawConn, error) {
	if raw, ok := c.NetConn().(syscall.Conn); ok {
		return raw.SyscallConn()
	}
	return nil, syscall.EINVAL
}

// CloseWrite ends the WebSocket in the direction to the client, which answers by closing it.
func (c *tunnelConn) CloseWrite() error {
	end := websocket.FormatCloseMessage(websocket.CloseNormalClosure, "")
	return c.WriteControl(websocket.CloseMessage, end, time.Now().Add(lingerTime))
}
