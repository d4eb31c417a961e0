package dataplane

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// TestStuckClient: a client that allows much and then reads nothing, not even from its socket, cannot keep a call.
func TestStuckClient(t *testing.T) {
	ended := make(chan error, 1)
	s, err := NewServer(Config{Logger: slog.New(slog.DiscardHandler), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		var err error
		for piece := make([]byte, 64<<10); err == nil; {
			_, err = w.Write(piece)
		}
		ended <- err
	})})
	if err != nil {
		t.Fatal(err)
	}
	if s.http.HTTP2.WriteByteTimeout <= 0 {
		t.Fatal("no limit")
	}
	s.http.HTTP2.WriteByteTimeout = 200 * time.Millisecond
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(Sockets{Cleartext: l}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	f := http2.NewFramer(conn, conn)
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	for _, field := range []hpack.HeaderField{{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: "/"}, {Name: ":authority", Value: "a"}} {
		if err := e.WriteField(field); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1}), f.WriteWindowUpdate(0, 1<<30),
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the call does not end")
	}
}
