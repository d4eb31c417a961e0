package dataplane

import (
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"
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
	if s.web.http2.StuckTime <= 0 {
		t.Fatal("no limit")
	}
	s.web.http2.StuckTime = 200 * time.Millisecond
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(Sockets{Cleartext: l}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	c := dialRaw(t, l.Addr().String(), http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
	if err := c.WriteWindowUpdate(0, 1<<30); err != nil {
		t.Fatal(err)
	}
	c.request(t, 1, true, "/")
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the call does not end")
	}
}
