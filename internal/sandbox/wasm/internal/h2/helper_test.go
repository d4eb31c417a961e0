package h2

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

func testConfig(h http.Handler) Config {
	return Config{
		Handler: h, MaxStreams: 100, StreamWindow: 1 << 20, ConnWindow: 4 << 20, MaxHeaderBytes: 64 << 10,
		PrefaceTimeout: 10 * time.Second, IdleTimeout: 5 * time.Minute, PingAfter: 30 * time.Second, GoneAfter: 45 * time.Second,
		StuckTime: 15 * time.Second, Logger: slog.New(slog.DiscardHandler),
	}
}

// start starts a server on loopback, and returns its address.
func start(t testing.TB, c Config) (*Server, string) { return startOver(t, c, nil) }

// startOver is start for connections that claim to have a state of TLS.
func startOver(t testing.TB, c Config, state *tls.ConnectionState) (*Server, string) {
	t.Helper()
	s := NewServer(c)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			socket, err := l.Accept()
			if err != nil {
				return
			}
			go s.Serve(context.Background(), socket, state)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		s.Close()
	})
	return s, l.Addr().String()
}

// client returns a client of net/http that speaks HTTP/2 over cleartext.
func client(t testing.TB) *http.Client {
	transport := &http.Transport{Protocols: &http.Protocols{}}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// rawClient sends and reads frames.
type rawClient struct {
	t      testing.TB
	conn   net.Conn
	framer *http2.Framer
	out    bytes.Buffer // frames for the next send
	block  bytes.Buffer
	hpack  *hpack.Encoder
}

// dialRaw connects, sends the preface and the given settings, and reads the server's settings.
func dialRaw(t testing.TB, address string, settings ...http2.Setting) *rawClient {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c := &rawClient{t: t, conn: conn}
	c.framer = http2.NewFramer(&c.out, conn)
	c.framer.AllowIllegalWrites = true
	c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	c.hpack = hpack.NewEncoder(&c.block)
	c.out.WriteString(http2.ClientPreface)
	c.write(c.framer.WriteSettings(settings...))
	c.write(c.send())
	return c
}

// write checks the error of a frame's write, which has no effect before send.
func (c *rawClient) write(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// send sends the frames. It returns an error if the server has closed the connection.
func (c *rawClient) send() error {
	_, err := c.out.WriteTo(c.conn)
	return err
}

// request writes the HEADERS frame of a request.
func (c *rawClient) request(id uint32, end bool, fields ...string) {
	c.t.Helper()
	c.headers(id, end, append([]string{":method", "POST", ":scheme", "http", ":path", "/", ":authority", "test"}, fields...)...)
}

// headers writes a HEADERS frame.
func (c *rawClient) headers(id uint32, end bool, fields ...string) {
	c.t.Helper()
	c.block.Reset()
	for i := 0; i < len(fields); i += 2 {
		c.write(c.hpack.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}))
	}
	c.write(c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: c.block.Bytes(), EndHeaders: true, EndStream: end}))
}

// next returns the next frame that is neither about windows nor about settings.
func (c *rawClient) next() (http2.Frame, error) {
	_ = c.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	for {
		f, err := c.framer.ReadFrame()
		switch f.(type) {
		case *http2.SettingsFrame, *http2.WindowUpdateFrame:
			continue
		}
		return f, err
	}
}

// wantReset reads frames until RST_STREAM of a stream, and checks its code.
func (c *rawClient) wantReset(id uint32, code http2.ErrCode) {
	c.t.Helper()
	for {
		f, err := c.next()
		if err != nil {
			c.t.Fatalf("read = %v, want RST_STREAM %v", err, code)
		}
		if r, ok := f.(*http2.RSTStreamFrame); ok && r.StreamID == id {
			if r.ErrCode != code {
				c.t.Errorf("RST_STREAM of stream %d = %v, want %v", id, r.ErrCode, code)
			}
			return
		}
	}
}

// wantGoAway reads frames until GOAWAY or the end, and checks the code.
func (c *rawClient) wantGoAway(code http2.ErrCode) {
	c.t.Helper()
	for {
		f, err := c.next()
		if err != nil {
			c.t.Errorf("read = %v, want GOAWAY %v", err, code)
			return
		}
		if g, ok := f.(*http2.GoAwayFrame); ok {
			if g.ErrCode != code {
				c.t.Errorf("GOAWAY = %v, want %v", g.ErrCode, code)
			}
			return
		}
	}
}

func hpackField(name, value string) hpack.HeaderField {
	return hpack.HeaderField{Name: name, Value: value}
}
