package broker_test

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/tlsfile"
	"github.com/tripod-run/tripod/test/mosquitto"
)

// webServer starts a broker with a WebSocket address and returns its URL.
func webServer(t testing.TB, cfg broker.Config) (*server, string) {
	cfg.WebSocketAddress = mosquitto.FreeAddress(t)
	return embedded(t, cfg), "ws://" + cfg.WebSocketAddress
}

// webConn is a client's WebSocket as a net.Conn: Write sends one binary message, Read joins the messages.
type webConn struct {
	*websocket.Conn
	io.Reader
}

func (c webConn) Write(p []byte) (int, error) {
	return len(p), c.WriteMessage(websocket.BinaryMessage, p)
}

func (c webConn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

func dialWeb(t testing.TB, url string) (*raw, *websocket.Conn) {
	d := websocket.Dialer{Subprotocols: []string{"other", "mqtt"}, WriteBufferSize: 64}
	c, _, err := d.DialContext(patient(t), url, nil)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	return &raw{webConn{c, websocket.JoinMessages(c, "")}}, c
}

// assertClosed checks that a close frame with the code is next.
func assertClosed(t testing.TB, r *raw, code int) {
	t.Helper()
	_, err := io.ReadFull(r.conn, make([]byte, 1))
	assert.True(t, websocket.IsCloseError(err, code), err)
}

var ping, pong = []byte{0xc0, 0}, []byte{0xd0, 0}

// TestWebSocketFrames: packets are read from binary frames whatever the borders of frames and messages are.
func TestWebSocketFrames(t *testing.T) {
	_, url := webServer(t, broker.Config{})
	hello := connectPacket(4, 2, "") // the broker assigns an identifier
	subscribe := packet(0x82, slices.Concat([]byte{0, 1}, str("t"), []byte{0}))
	publish := func(size int) []byte { return packet(0x30, append(str("t"), bytes.Repeat([]byte{'x'}, size)...)) }
	for name, send := range map[string]func(r *raw, c *websocket.Conn){
		"a packet each": func(r *raw, _ *websocket.Conn) {
			r.send(hello)
			r.send(subscribe)
			r.send(publish(100))
		},
		"a byte each": func(r *raw, _ *websocket.Conn) {
			for _, b := range slices.Concat(hello, subscribe, publish(100)) {
				r.send([]byte{b})
			}
		},
		"all in one, fragmented": func(r *raw, _ *websocket.Conn) { r.send(slices.Concat(hello, subscribe, publish(100))) },
		"empty and control frames": func(r *raw, c *websocket.Conn) {
			for _, p := range [][]byte{hello, subscribe, publish(100)} {
				r.send(nil)
				r.send(p[:1])
				assert.NoError(t, c.WriteControl(websocket.PingMessage, []byte("between"), time.Now().Add(patience)))
				r.send(p[1:])
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, c := dialWeb(t, url+"/mqtt")
			assert.Equal(t, "mqtt", c.Subprotocol())
			send(r, c)
			assert.Equal(t, []byte{0x20, 2, 0, 0}, r.read(t))
			assert.Equal(t, []byte{0x90, 3, 0, 1, 0}, r.read(t))
			assert.Equal(t, publish(100), r.read(t))
		})
	}
}

// TestWebSocketPing: the broker answers WebSocket's pings, which are no sign of life to MQTT's keep alive. When it closes
// the connection, a close frame follows its DISCONNECT.
func TestWebSocketPing(t *testing.T) {
	_, url := webServer(t, broker.Config{})
	r, c := dialWeb(t, url)
	pongs := make(chan string, 100)
	c.SetPongHandler(func(text string) error { pongs <- text; return nil })
	hello := connectPacket(5, 2, "idle")
	hello[11] = 1 // keep alive
	begin := time.Now()
	r.send(hello)
	r.read(t)
	require.NoError(t, c.WriteControl(websocket.PingMessage, []byte("first"), time.Now().Add(patience)))
	go func() {
		for err := error(nil); err == nil; time.Sleep(100 * time.Millisecond) { // pacing: the pings of WebSocket are no packets
			err = c.WriteControl(websocket.PingMessage, nil, time.Now().Add(patience))
		}
	}()
	assert.Equal(t, []byte{0xe0, 2, 0x8d, 0}, r.read(t), "keep alive timeout")
	assert.GreaterOrEqual(t, time.Since(begin), 1500*time.Millisecond)
	assertClosed(t, r, websocket.CloseNormalClosure)
	assert.Equal(t, "first", <-pongs)
}

// TestWebSocketText: a text frame closes the connection; the will is published.
func TestWebSocketText(t *testing.T) {
	s, url := webServer(t, broker.Config{})
	sub, in := connect(t, s, mqtt.Config{})
	require.NoError(t, sub.Subscribe(patient(t), "will", 1, mqtt.SubscribeOptions{}))
	r, c := dialWeb(t, url)
	r.send(connectPacket(5, 2|4, "text", "will", "gone"))
	r.read(t)
	require.NoError(t, c.WriteMessage(websocket.TextMessage, ping))
	assertClosed(t, r, websocket.CloseUnsupportedData)
	in.wait(t, "gone")
}

// TestWebSocketClose: the broker ends its WebSocket connections when it closes, and clients that leave without a word.
func TestWebSocketClose(t *testing.T) {
	limiter := connlimit.NewGroup(nil).Limiter("broker", connlimit.Config{})
	s, url := webServer(t, broker.Config{Connections: limiter})
	left, _ := dialWeb(t, url)
	left.send(connectPacket(4, 2, "left"))
	left.read(t)
	require.Equal(t, 1, limiter.Stats().Open)
	left.conn.Close()
	require.Eventually(t, func() bool { return s.stats().Clients == 0 && limiter.Stats().Open == 0 }, patience, time.Millisecond)

	silent, _ := dialWeb(t, url)
	r, _ := dialWeb(t, url)
	r.send(connectPacket(5, 2, "stays"))
	r.read(t)
	s.stop(t)
	assert.Equal(t, []byte{0xe0, 2, 0x8b, 0}, r.read(t), "shutting down")
	for _, one := range []*raw{r, silent} {
		assertClosed(t, one, websocket.CloseNormalClosure)
	}
	require.Eventually(t, func() bool { return limiter.Stats().Open == 0 }, patience, time.Millisecond)
}

// TestWebSocketSizes: the maximum packet size bounds packets, not messages. A larger packet is refused before it has arrived.
func TestWebSocketSizes(t *testing.T) {
	s, url := webServer(t, broker.Config{MaxPacket: 64 << 10})
	sub, in := connect(t, s, mqtt.Config{})
	require.NoError(t, sub.Subscribe(patient(t), "t", 1, mqtt.SubscribeOptions{}))
	r, c := dialWeb(t, url)
	r.send(connectPacket(5, 2, "sizes"))
	r.read(t)
	publish := packet(0x32, slices.Concat(str("t"), []byte{0, 1, 0}, make([]byte, 60<<10), []byte("end")))
	r.send(slices.Concat(publish, publish, publish, ping))
	for range 3 {
		assert.Equal(t, []byte{0x40, 2, 0, 1}, r.read(t))
	}
	assert.Equal(t, pong, r.read(t))
	require.Eventually(t, func() bool { return len(in.all()) == 3 }, patience, time.Millisecond)

	// The header announces a frame of 1 TiB, which no broker has room for.
	_, err := c.NetConn().Write(slices.Concat([]byte{0x82, 0x80 | 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}, []byte{0x30, 0xff, 0xff, 0x7f}))
	require.NoError(t, err)
	assert.Equal(t, []byte{0xe0, 2, 0x95, 0}, r.read(t), "packet too large")
}

// TestWebSocketStuck: a client that does not read is disconnected, and delays nobody.
func TestWebSocketStuck(t *testing.T) {
	s, url := webServer(t, broker.Config{WriteTimeout: 200 * time.Millisecond, MaxQueued: 100})
	r, _ := dialWeb(t, url)
	r.send(slices.Concat(connectPacket(4, 2, "stuck"), packet(0x82, slices.Concat([]byte{0, 1}, str("t"), []byte{0}))))
	require.Eventually(t, func() bool { return s.stats().Subscriptions == 1 }, patience, time.Millisecond)
	pub, _ := connect(t, s, mqtt.Config{})
	payload := make([]byte, 1<<20)
	require.Eventually(t, func() bool {
		require.NoError(t, pub.Publish(patient(t), "t", 1, false, payload))
		return s.stats().Clients == 1
	}, patience, time.Millisecond)
}

// TestWebSocketHandshake: requests that get no WebSocket, and the origins of pages that do.
func TestWebSocketHandshake(t *testing.T) {
	s, url := webServer(t, broker.Config{WebSocketOrigins: []string{"https://app.example", "https://*.lab.example"}})
	_, open := webServer(t, broker.Config{WebSocketOrigins: []string{"*"}})
	_, closed := webServer(t, broker.Config{})
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(url, "ws://"))
	for _, try := range []struct {
		url, protocol, origin string
		status                int
	}{
		{url, "mqtt", "", 101},
		{url + "/", "mqtt", "", 101},
		{url + "/mqtt", "mqtt", "", 101},
		{url + "/other", "mqtt", "", 404},
		{url, "", "", 400},
		{url, "mqttv3.1", "", 400},
		{url, "mqtt", "https://app.example", 101},
		{url, "mqtt", "https://a.b.lab.example", 101},
		{url, "mqtt", "https://lab.example", 403},
		{url, "mqtt", "http://app.example", 403},
		{url, "mqtt", "https://app.example.evil.example", 403},
		{url, "mqtt", "http://127.0.0.1:3000", 101},
		{url, "mqtt", "http://localhost:3000", 403},
		{"ws://localhost:" + port, "mqtt", "http://localhost:3000", 101},
		{closed, "mqtt", "https://app.example", 403},
		{closed, "mqtt", "http://127.0.0.1", 101},
		{closed, "mqtt", "null", 403},
		{open, "mqtt", "https://evil.example", 101},
	} {
		header := http.Header{}
		if try.origin != "" {
			header.Set("Origin", try.origin)
		}
		d := websocket.Dialer{}
		if try.protocol != "" {
			d.Subprotocols = []string{try.protocol}
		}
		c, response, err := d.DialContext(patient(t), try.url, header)
		if err == nil {
			c.Close()
		}
		require.NotNil(t, response, err)
		assert.Equal(t, try.status, response.StatusCode, "%+v", try)
	}
	assert.EqualValues(t, 6, s.stats().Refused)

	// An attacker's name that resolves to the broker's address.
	request, err := http.NewRequestWithContext(patient(t), http.MethodGet, "http"+strings.TrimPrefix(closed, "ws"), nil)
	require.NoError(t, err)
	request.Host = "evil.example"
	request.Header = http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="},
		"Sec-Websocket-Protocol": {"mqtt"}, "Origin": {"http://evil.example"},
	}
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	response.Body.Close()
	assert.Equal(t, http.StatusForbidden, response.StatusCode)

	response, err = http.Get("http" + strings.TrimPrefix(url, "ws"))
	require.NoError(t, err)
	response.Body.Close()
	assert.Equal(t, http.StatusBadRequest, response.StatusCode, "not a WebSocket request")
}

// TestWebSocketTLS: the client's certificate is its user, as without WebSocket.
func TestWebSocketTLS(t *testing.T) {
	dir := certificates(t, "server", "node-1", "stranger")
	at := func(name string) string { return filepath.Join(dir, name) }
	b, err := broker.New(broker.Config{
		Address: "127.0.0.1:0", WebSocketTLSAddress: "127.0.0.1:0", Certificate: at("server.crt"), Key: at("server.key"), ClientCA: at("ca.crt"),
		Users: []broker.User{{Name: "node-1", PasswordFile: at("ca.key"), Realms: []string{"realm"}}},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(patient(t))) })
	dial := func(pair tlsfile.Pair) (*raw, error) {
		conf, err := pair.Client(at("ca.crt"))
		require.NoError(t, err)
		d := websocket.Dialer{Subprotocols: []string{"mqtt"}, TLSClientConfig: conf}
		c, _, err := d.DialContext(patient(t), "wss://"+b.Addresses()[1], nil)
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { c.Close() })
		return &raw{webConn{c, websocket.JoinMessages(c, "")}}, nil
	}
	for name, code := range map[string]byte{"node-1": 0, "stranger": 4} {
		r, err := dial(tlsfile.Pair{Certificate: at(name + ".crt"), Key: at(name + ".key")})
		require.NoError(t, err)
		r.send(connectPacket(4, 2, name))
		assert.Equal(t, []byte{0x20, 2, 0, code}, r.read(t), name)
	}
	_, err = dial(tlsfile.Pair{})
	assert.ErrorContains(t, err, "certificate required")
}
