package h2

import (
	"fmt"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/tripod-run/tripod/test/until"
)

// untilEnd is a handler that returns when the request's context ends.
func untilEnd(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// oneConn waits for the server's connection, and returns it.
func oneConn(t *testing.T, s *Server) (c *conn) {
	t.Helper()
	until.Holds(t, "the server has a connection", func() bool {
		s.each(func(each *conn) { c = each })
		return c != nil
	})
	return c
}

// holdsFor waits until a condition of a connection is true. The condition is called with the connection's lock.
func holdsFor(t *testing.T, c *conn, what string, holds func() bool) {
	t.Helper()
	until.Holds(t, what, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return holds()
	})
}

// wantError checks that a call of another goroutine fails, and does not hang.
func wantError(t *testing.T, call string, results chan error) {
	t.Helper()
	select {
	case err := <-results:
		if err == nil {
			t.Errorf("%s succeeds, want an error", call)
		}
	case <-time.After(20 * time.Second):
		t.Errorf("%s hangs", call)
	}
}

// trailer writes the HEADERS frame that ends a request.
func (c *rawClient) trailer(id uint32) {
	c.t.Helper()
	c.headers(id, true, "x-end", "yes")
}

// mustNext is next for tests in which the connection must not end.
func (c *rawClient) mustNext() http2.Frame {
	c.t.Helper()
	f, err := c.next()
	if err != nil {
		c.t.Fatal(err)
	}
	return f
}

// TestTableSizeUpdateFirst checks that a header block after new settings begins with the size of the table (RFC 7541,
// 4.2). Decoders refuse it at another place. Chrome and Firefox send that setting.
func TestTableSizeUpdateFirst(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	c := dialRaw(t, address)
	c.framer.ReadMetaHeaders = nil
	decoder := hpack.NewDecoder(tableSize, nil)
	for _, id := range []uint32{1, 3} { // Go's decoder accepts any place until its table has an entry
		c.write(c.framer.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 65536}))
		c.request(id, true)
		c.write(c.send())
		h, ok := c.mustNext().(*http2.HeadersFrame)
		if !ok {
			t.Fatal("the answer does not begin with HEADERS")
		}
		b := h.HeaderBlockFragment()
		if b[0]&0xe0 != 0x20 {
			t.Errorf("block of stream %d = % x, want a table size update first", id, b)
		}
		if fields, err := decoder.DecodeFull(b); err != nil || fields[0] != hpackField(":status", "200") {
			t.Errorf("fields of stream %d = %v, %v; want :status 200", id, fields, err)
		}
	}
}

// TestGoClientSmallReads checks that the client of net/http can read a large body in small parts. It sends two
// WINDOW_UPDATE frames for each 4 KiB.
func TestGoClientSmallReads(t *testing.T) {
	const size = 16 << 20
	_, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		b := make([]byte, 64<<10)
		for range size / len(b) {
			_, _ = w.Write(b)
		}
	})))
	response, err := client(t).Do(request(t, "GET", "http://"+address, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{response.Body}, make([]byte, 4<<10))
	if n != size || err != nil {
		t.Errorf("read = %d bytes, %v; want %d", n, err, size)
	}
}

// TestReadAfterReturn checks that a goroutine that copies the request's body, as in reverse proxies, ends when the handler
// returns before the end of the request.
func TestReadAfterReturn(t *testing.T) {
	results := make(chan error, 1)
	_, address := start(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		pr, pw := io.Pipe()
		go func() {
			_, err := io.Copy(pw, r.Body)
			results <- err
		}()
		_, _ = pr.Read(make([]byte, 1))
	})))
	c := dialRaw(t, address)
	c.request(1, false)
	c.write(c.framer.WriteData(1, false, []byte("x")))
	c.write(c.send())
	c.wantReset(1, http2.ErrCodeNo)
	wantError(t, "a read after the handler has returned", results)
}

// TestWriteAfterReturn checks that a write that waits for a window ends when the handler returns.
func TestWriteAfterReturn(t *testing.T) {
	results, release := make(chan error, 1), make(chan struct{})
	_, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.(http.Flusher).Flush()
		go func() {
			_, err := w.Write(make([]byte, 1<<20))
			results <- err
		}()
		<-release
	})))
	c := dialRaw(t, address)
	c.request(1, true)
	c.write(c.send())
	for got := 0; got < defaultWindow; {
		if d, ok := c.mustNext().(*http2.DataFrame); ok {
			got += len(d.Data())
		}
	}
	close(release)
	wantError(t, "a write after the handler has returned", results)
}

// TestFramesOfResetStreams checks that data and trailers that were on their way when the server reset their streams are
// ignored, for all the streams that can be open.
func TestFramesOfResetStreams(t *testing.T) {
	for _, test := range []struct {
		name                         string
		handler                      http.HandlerFunc
		maxStreams, requests, resets int
	}{
		{"answered early", func(http.ResponseWriter, *http.Request) {}, 250, 200, 200},
		{"refused", untilEnd, 100, 160, 60},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := testConfig(test.handler)
			config.MaxStreams = test.maxStreams
			_, address := start(t, config)
			c := dialRaw(t, address)
			for i := range test.requests {
				c.request(uint32(2*i+1), false)
			}
			c.write(c.send())
			var reset []uint32
			for len(reset) < test.resets {
				if f, ok := c.mustNext().(*http2.RSTStreamFrame); ok {
					reset = append(reset, f.StreamID)
				}
			}
			for _, id := range reset {
				for range 20 { // more than the budget in all
					c.write(c.framer.WriteData(id, false, []byte("message")))
				}
				c.trailer(id)
			}
			c.write(c.framer.WritePing(false, [8]byte{7}))
			_ = c.send() // the server may have closed the connection
			if f, ok := c.mustNext().(*http2.PingFrame); !ok {
				t.Errorf("answer = %v, want only that to the ping", f)
			}
		})
	}
}

// TestContinueAfterHeader checks that 100 Continue does not follow the header of the answer.
func TestContinueAfterHeader(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		_, _ = io.Copy(w, r.Body)
	})))
	c := dialRaw(t, address)
	c.request(1, false, "expect", "100-continue", "content-length", "1")
	c.write(c.send())
	var statuses []string
	for {
		switch f := c.mustNext().(type) {
		case *http2.MetaHeadersFrame:
			statuses = append(statuses, f.PseudoValue("status"))
			if len(statuses) == 1 {
				c.write(c.framer.WriteData(1, true, []byte("x")))
				c.write(c.send())
			}
		case *http2.DataFrame:
			if !f.StreamEnded() {
				continue
			}
			if fmt.Sprint(statuses) != "[200]" {
				t.Errorf("statuses = %v, want [200]", statuses)
			}
			return
		}
	}
}

// TestPseudoValues checks that values of pseudo-header fields with control characters are refused (RFC 9113, 8.2.1).
func TestPseudoValues(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("the handler got %q %q", r.Host, r.RequestURI)
	})))
	c := dialRaw(t, address)
	for i, fields := range [][]string{
		{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a\r\nx-evil: 1"},
		{":method", "GET", ":scheme", "ht\x00tp", ":path", "/", ":authority", "a"},
		{":method", "CONNECT", ":authority", "a\r\nx-evil: 1"},
	} {
		id := uint32(2*i + 1)
		c.headers(id, true, fields...)
		c.write(c.send())
		c.wantReset(id, http2.ErrCodeProtocol)
	}
}

// TestHost checks that :authority decides, and that a Host without it must be one valid value (RFC 9110, 7.2).
func TestHost(t *testing.T) {
	seen := make(chan string, 1)
	_, address := start(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		seen <- fmt.Sprint(r.Host, " ", r.Header)
	})))
	c := dialRaw(t, address)
	for i, test := range []struct {
		want   string // empty if the request is malformed
		fields []string
	}{
		{"a map[]", []string{":authority", "a"}},
		{"a map[]", []string{":authority", "a", "host", "a"}},
		{"a map[]", []string{":authority", "a", "host", "b", "host", "c"}},
		{"b map[]", []string{"host", "b"}},
		{"b map[]", []string{":authority", "", "host", "b"}},
		{" map[]", nil},
		{"", []string{"host", "b", "host", "c"}},
		{"", []string{"host", "b c"}},
	} {
		id := uint32(2*i + 1)
		c.headers(id, true, append([]string{":method", "GET", ":scheme", "http", ":path", "/"}, test.fields...)...)
		c.write(c.send())
		if test.want == "" {
			c.wantReset(id, http2.ErrCodeProtocol)
		} else if got := <-seen; got != test.want {
			t.Errorf("%q: the handler got %q, want %q", test.fields, got, test.want)
		}
	}
}

// TestSwitchingProtocols checks that a handler cannot answer 101, which HTTP/2 does not have (RFC 9113, 8.6).
func TestSwitchingProtocols(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusSwitchingProtocols)
	})))
	c := dialRaw(t, address)
	c.request(1, true)
	c.write(c.send())
	if f, ok := c.mustNext().(*http2.RSTStreamFrame); !ok || f.ErrCode != http2.ErrCodeInternal {
		t.Errorf("answer = %v, want RST_STREAM INTERNAL_ERROR", f)
	}
}

// TestFramesOfIdleStreams checks that frames of streams that no client has opened end the connection (RFC 9113, 5.1 and 6.4).
func TestFramesOfIdleStreams(t *testing.T) {
	_, address := start(t, testConfig(http.NotFoundHandler()))
	for _, id := range []uint32{2, 3} { // the server's, and one after the client's last
		for _, frame := range []func(f *http2.Framer) error{
			func(f *http2.Framer) error { return f.WriteRSTStream(id, http2.ErrCodeCancel) },
			func(f *http2.Framer) error { return f.WriteWindowUpdate(id, 1) },
			func(f *http2.Framer) error { return f.WriteData(id, true, nil) },
		} {
			c := dialRaw(t, address)
			c.request(1, true)
			c.write(frame(c.framer))
			c.write(c.send())
			c.wantGoAway(http2.ErrCodeProtocol)
		}
	}
}

// TestTrailerRace checks that a handler can use the trailer after the end of the body while another goroutine reads.
func TestTrailerRace(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = r.Body.Read(make([]byte, 1)) })
		if end := r.Trailer.Get("X-End"); end != "yes" {
			t.Errorf("trailer = %q, want yes", end)
		}
		wg.Wait()
	})))
	c := dialRaw(t, address)
	c.request(1, false, "trailer", "x-end")
	c.trailer(1)
	c.write(c.send())
	c.mustNext()
}

// TestPingBesidePartialFrame checks that the answer to a ping does not wait for the rest of another frame.
func TestPingBesidePartialFrame(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(untilEnd)))
	c := dialRaw(t, address)
	c.write(c.framer.WritePing(false, [8]byte{7}))
	c.out.Write([]byte{0, 0, 8, byte(http2.FramePing)})
	c.write(c.send())
	if f, ok := c.mustNext().(*http2.PingFrame); !ok {
		t.Errorf("answer = %v, want that to the ping", f)
	}
}

// TestWindowAccounting checks that the window of the connection is whole again after streams that have ended in all
// combinations of what the handler and the client do.
func TestWindowAccounting(t *testing.T) {
	config := testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		switch r.Header.Get("X-Kind") {
		case "0":
			_, _ = io.Copy(w, r.Body)
		case "1": // reads nothing
		case "2":
			_, _ = r.Body.Read(make([]byte, 100))
		case "3":
			_, _ = r.Body.Read(make([]byte, 100))
			panic(http.ErrAbortHandler)
		case "4":
			_ = control.SetWriteDeadline(time.Now().Add(time.Millisecond))
			_, _ = w.Write(make([]byte, 1<<20))
		case "5":
			_ = control.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, _ = io.ReadAll(r.Body)
		case "6":
			r.Body.Close()
			fallthrough
		case "7":
			select {
			case <-r.Context().Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	}))
	config.StreamWindow, config.ConnWindow = 1<<18, 1<<20
	s, address := start(t, config)
	c := dialRaw(t, address)
	conn := oneConn(t, s)
	go func() { _, _ = io.Copy(io.Discard, c.conn) }()
	c.write(c.framer.WriteWindowUpdate(0, 1<<30))
	padding := make([]byte, 100)
	for i := range 400 {
		id := uint32(2*i + 1)
		c.request(id, false, "x-kind", fmt.Sprint(i%8), "content-length", "3000")
		c.write(c.framer.WriteDataPadded(id, false, make([]byte, 1000), padding))
		c.write(c.framer.WriteDataPadded(id, false, nil, padding))
		switch i % 5 {
		case 0:
			c.write(c.framer.WriteData(id, true, make([]byte, 2000)))
		case 1:
			c.write(c.framer.WriteRSTStream(id, http2.ErrCodeCancel))
		case 2:
			c.write(c.framer.WriteData(id, true, make([]byte, 1999))) // too short
		case 3:
			c.write(c.framer.WriteData(id, true, make([]byte, 2001))) // too long
		case 4:
			c.write(c.framer.WriteDataPadded(id, false, make([]byte, 10), padding))
			c.write(c.framer.WriteRSTStream(id, http2.ErrCodeCancel))
		}
		c.write(c.send())
		if i%40 == 39 { // each combination
			holdsFor(t, conn, "the window is whole", func() bool {
				conn.budget.spent = 0
				return len(conn.streams) == 0 && conn.handlers == 0 && conn.received.available+conn.received.pending == config.ConnWindow
			})
		}
	}
}
