package broker

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	"github.com/rs/cors"
)

// subprotocol is the WebSocket subprotocol of all versions of MQTT (MQTT 5.0 §6).
const subprotocol = "mqtt"

// closeTimeout bounds the write of a WebSocket close frame.
const closeTimeout = time.Second

// webServer returns the HTTP server that makes MQTT connections out of WebSocket requests to / and /mqtt.
func (s *server) webServer() *http.Server {
	upgrader := websocket.Upgrader{Subprotocols: []string{subprotocol}, WriteBufferPool: &sync.Pool{}, CheckOrigin: s.originCheck()}
	upgrade := func(w http.ResponseWriter, r *http.Request) {
		if websocket.IsWebSocketUpgrade(r) && !slices.Contains(websocket.Subprotocols(r), subprotocol) {
			s.refused.Add(1)
			http.Error(w, "the WebSocket subprotocol mqtt is missing", http.StatusBadRequest)
			return
		}
		if c, err := upgrader.Upgrade(w, r, nil); err == nil { // otherwise the client has the answer
			s.begin(&webSocket{Conn: c})
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/{$}", upgrade)
	mux.HandleFunc("/mqtt", upgrade)
	web := s.cfg.Connections.HTTPServer(mux)
	web.ErrorLog = slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)
	return web
}

// originCheck returns the function that decides which web pages may connect. Programs send no origin.
func (s *server) originCheck() func(*http.Request) bool {
	listed := func(*http.Request) bool { return false }
	if len(s.cfg.WebSocketOrigins) > 0 { // to cors.New, an empty list means all
		listed = cors.New(cors.Options{AllowedOrigins: s.cfg.WebSocketOrigins}).OriginAllowed
	}
	return func(r *http.Request) bool {
		o := r.Header.Get("Origin")
		if o == "" || ownPage(o, r.Host) || listed(r) {
			return true
		}
		s.refused.Add(1)
		s.origins.Do(func() {
			s.log.Warn("broker: a web page may not connect, because its origin is not in websocket_origins", "origin", o, "remote", r.RemoteAddr)
		})
		return false
	}
}

// ownPage reports whether a page comes from the host of the request. Names other than localhost do not count: an attacker's
// page can let its own name resolve to the broker's address (DNS rebinding).
func ownPage(origin, host string) bool {
	from, err := url.Parse(origin)
	if err != nil {
		return false
	}
	to := (&url.URL{Host: host}).Hostname()
	return from.Hostname() == to && (to == "localhost" || net.ParseIP(to) != nil)
}

// webSocket is the net.Conn of MQTT over WebSocket: the bytes of its binary messages, whatever their borders. Read streams
// a message, so its size needs no limit. The library answers pings during Read.
type webSocket struct {
	*websocket.Conn
	message io.Reader // the current one; nil: there is none

	mu          sync.Mutex
	writingEnds time.Time
}

// Read implements net.Conn. A text message ends the connection (MQTT-6.0.0-1).
func (w *webSocket) Read(p []byte) (int, error) {
	for {
		if w.message == nil {
			kind, message, err := w.NextReader()
			if err != nil {
				return 0, err
			}
			if kind != websocket.BinaryMessage {
				w.sendClose(websocket.CloseUnsupportedData, "MQTT needs binary messages")
				return 0, errors.New("a WebSocket message is not binary")
			}
			w.message = message
		}
		n, err := w.message.Read(p)
		if err == io.EOF {
			w.message, err = nil, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// Write implements net.Conn. It sends one message.
func (w *webSocket) Write(p []byte) (int, error) {
	w.mu.Lock()
	ends := w.writingEnds
	w.mu.Unlock()
	if err := w.Conn.SetWriteDeadline(ends); err != nil {
		return 0, err
	}
	if err := w.WriteMessage(websocket.BinaryMessage, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// SetWriteDeadline implements net.Conn. It also cuts a Write short that waits for the client, unlike the library's method. If
// a Write begins at the same moment, the previous deadline may hold for it.
func (w *webSocket) SetWriteDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.writingEnds = t
	return w.NetConn().SetWriteDeadline(t)
}

// SetDeadline implements net.Conn.
func (w *webSocket) SetDeadline(t time.Time) error {
	return errors.Join(w.SetReadDeadline(t), w.SetWriteDeadline(t))
}

// Close implements net.Conn.
func (w *webSocket) Close() error {
	w.sendClose(websocket.CloseNormalClosure, "")
	return w.Conn.Close()
}

// sendClose sends a close frame, unless one was sent or the connection is broken.
func (w *webSocket) sendClose(code int, why string) {
	_ = w.WriteControl(websocket.CloseMessage, websocket.FormatCloseMessage(code, why), time.Now().Add(closeTimeout))
}

// tlsConn returns the TLS connection below a connection, or nil.
func tlsConn(c transport) *tls.Conn {
	for {
		if t, ok := c.(*tls.Conn); ok {
			return t
		}
		layer, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = layer.NetConn()
	}
}
