package h2

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// TestGoAwayBeforeSettings checks that settings come before GOAWAY if Shutdown is called before the connection is served.
func TestGoAwayBeforeSettings(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	go newConn(NewServer(testConfig(http.NotFoundHandler())), t.Context(), a, nil).drain()
	f, err := http2.NewFramer(io.Discard, b).ReadFrame()
	if _, ok := f.(*http2.SettingsFrame); !ok {
		t.Errorf("first frame = %v, %v; want SETTINGS", f, err)
	}
}

// TestGoAwayID checks that the last stream of GOAWAY does not grow (RFC 9113, 6.8), although the client opens another one
// and makes an error.
func TestGoAwayID(t *testing.T) {
	entered := make(chan struct{})
	s, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		untilEnd(w, r)
	})))
	c := dialRaw(t, address)
	c.request(1, true)
	c.write(c.send())
	<-entered
	go func() { _ = s.Shutdown(t.Context()) }()
	var ids []uint32
	for len(ids) < 3 {
		switch f := c.mustNext().(type) {
		case *http2.PingFrame:
			c.write(c.framer.WritePing(true, f.Data))
			c.write(c.send())
		case *http2.GoAwayFrame:
			if ids = append(ids, f.LastStreamID); len(ids) == 2 {
				c.request(7, true)
				c.write(c.framer.WriteRawFrame(http2.FramePing, 0, 0, []byte("short")))
				c.write(c.send())
			}
		}
	}
	if want := []uint32{maxWindow, 1, 1}; fmt.Sprint(ids) != fmt.Sprint(want) {
		t.Errorf("last streams = %v, want %v", ids, want)
	}
}

// TestGoAwayBehindAWrite checks that a client that has made an error gets GOAWAY although a write of a handler waits for
// it.
func TestGoAwayBehindAWrite(t *testing.T) {
	s, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for b := make([]byte, 1<<20); ; {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	})))
	c := dialRaw(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
	c.write(c.framer.WriteWindowUpdate(0, 1<<30))
	c.request(1, true)
	c.write(c.send())
	conn := oneConn(t, s)
	window, looks := int64(0), 0
	holdsFor(t, conn, "a write waits for the client", func() bool {
		if looks++; !conn.flushing || conn.window != window {
			window, looks = conn.window, 0
		}
		return looks == 20
	})
	c.write(c.framer.WriteRawFrame(http2.FramePing, 0, 0, []byte("short")))
	c.write(c.send())
	holdsFor(t, conn, "the server has found the error", func() bool { return len(conn.streams) == 0 })
	c.wantGoAway(http2.ErrCodeFrameSize)
}

// TestSettingsAfterDrain checks that the first settings of a client do not undo the bound on the wait for its end of the
// connection.
func TestSettingsAfterDrain(t *testing.T) {
	s, address := start(t, testConfig(http.NotFoundHandler()))
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	oneConn(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	down := make(chan error, 1)
	go func() { down <- s.Shutdown(ctx) }()
	_, _ = io.Copy(io.Discard, conn)   // until the server has closed its side
	time.Sleep(100 * time.Millisecond) // pacing: no event shows that the deadline for our side is set
	_, _ = io.WriteString(conn, http2.ClientPreface)
	_ = http2.NewFramer(conn, nil).WriteSettings()
	if err := <-down; err != nil {
		t.Errorf("Shutdown = %v", err)
	}
}

// TestDrainKeepsAnswer checks that a client gets the last answer completely, although it sends frames after the server has
// written everything and before it has read that.
func TestDrainKeepsAnswer(t *testing.T) {
	const size = 512 << 10
	release := make(chan struct{})
	s, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		<-release
		_, _ = w.Write(make([]byte, size))
	})))
	c := dialRaw(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: size})
	_ = c.conn.(*net.TCPConn).SetReadBuffer(64 << 10) // the rest stays with the server
	c.write(c.framer.WriteWindowUpdate(0, size))
	c.request(1, true)
	c.write(c.send())
	conn := oneConn(t, s)
	holdsFor(t, conn, "the request has begun", func() bool { return len(conn.streams) == 1 })
	go func() { _ = s.Shutdown(t.Context()) }()
	c.wantGoAway(http2.ErrCodeNo)
	c.write(c.framer.WritePing(true, drainPing))
	c.write(c.send())
	c.wantGoAway(http2.ErrCodeNo)
	close(release)
	holdsFor(t, conn, "everything is written", func() bool { return conn.closing })
	time.Sleep(50 * time.Millisecond) // pacing: the client sees the end of the server's side only after the answer
	c.write(c.framer.WritePing(false, [8]byte{7}))
	c.write(c.send())
	time.Sleep(50 * time.Millisecond) // pacing: the server gives no answer to this ping
	c.write(c.framer.WriteWindowUpdate(0, 1))
	_ = c.send() // a server that has closed the connection resets it now
	for got := 0; ; {
		d, ok := c.mustNext().(*http2.DataFrame)
		if !ok {
			continue
		}
		if got += len(d.Data()); d.StreamEnded() {
			if got != size {
				t.Errorf("answer of %d bytes, want %d", got, size)
			}
			return
		}
	}
}
