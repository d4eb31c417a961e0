package stream

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
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
		CheckOrigin:  func(*http.Request) bool { return true }, // the URL's token is the permission
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
	message io.Reader // the one that is being read; nil before the first and between two
}

var _ net.Conn = (*tunnelConn)(nil)

// Read implements io.Reader. A client that closes the WebSocket ends the connection.
func (c *tunnelConn) Read(p []byte) (int, error) {
	for {
		if c.message == nil {
			kind, message, err := c.NextReader()
			switch {
			case websocket.IsCloseError(err, websocket.CloseNormalClosure, websocket.CloseGoingAway):
				return 0, io.EOF
			case err != nil:
				return 0, err
			case kind != websocket.BinaryMessage:
				return 0, errors.New("a tunnel carries binary messages only")
			}
			c.message = message
		}
		n, err := c.message.Read(p)
		if err == io.EOF {
			c.message, err = nil, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
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
