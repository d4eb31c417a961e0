package h2

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// get makes a request and returns the response with its body read.
func get(t *testing.T, c *http.Client, r *http.Request) (*http.Response, string) {
	t.Helper()
	response, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	b, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(b)
}

func request(t *testing.T, method, url string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestResponses checks what the server adds to responses, as net/http does.
func TestResponses(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/nothing", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/short", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") })
	mux.HandleFunc("/pieces", func(w http.ResponseWriter, _ *http.Request) {
		for range 3000 {
			fmt.Fprint(w, "piece")
		}
	})
	mux.HandleFunc("/flushed", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "a")
		w.(http.Flusher).Flush()
		w.Header().Set("X-Late", "too late")
		fmt.Fprint(w, "b")
	})
	mux.HandleFunc("/status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "keep-alive")
		w.Header().Set("X-Bad", "a\nb")
		w.WriteHeader(http.StatusTeapot)
		w.Header().Set("X-Late", "too late")
	})
	mux.HandleFunc("/none", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
		if _, err := w.Write([]byte("x")); !errors.Is(err, http.ErrBodyNotAllowed) {
			t.Errorf("Write after 204 = %v, want ErrBodyNotAllowed", err)
		}
	})
	mux.HandleFunc("/long", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "3")
		fmt.Fprint(w, "abc")
		if _, err := w.Write([]byte("d")); !errors.Is(err, http.ErrContentLength) {
			t.Errorf("Write of more than the length = %v, want ErrContentLength", err)
		}
	})
	mux.HandleFunc("/trailers", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Announced")
		fmt.Fprint(w, "body")
		w.Header().Set("X-Announced", "1")
		w.Header().Set(http.TrailerPrefix+"X-Other", "2")
	})
	mux.HandleFunc("/only-trailers", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set(http.TrailerPrefix+"X-Other", "2") })
	mux.HandleFunc("/large-header", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Large", strings.Repeat("v", 40_000))
	})
	_, address := start(t, testConfig(mux))
	c := client(t)
	for path, want := range map[string]struct {
		method, body, length, contentType string
		status                            int
	}{
		"/nothing":        {"GET", "", "0", "", 200},
		"/short":          {"GET", "<html>", "6", "text/html; charset=utf-8", 200},
		"/short?head":     {"HEAD", "", "6", "", 200},
		"/pieces":         {"GET", strings.Repeat("piece", 3000), "", "text/plain; charset=utf-8", 200},
		"/flushed":        {"GET", "ab", "", "text/plain; charset=utf-8", 200},
		"/status":         {"GET", "", "0", "", 418},
		"/none":           {"GET", "", "", "", 204},
		"/long":           {"GET", "abc", "3", "text/plain; charset=utf-8", 200},
		"/trailers":       {"GET", "body", "4", "text/plain; charset=utf-8", 200},
		"/only-trailers":  {"GET", "", "0", "", 200},
		"/large-header":   {"GET", "", "0", "", 200},
		"/a%20b?q=%3D#no": {"GET", "404 page not found\n", "19", "text/plain; charset=utf-8", 404},
	} {
		r, body := get(t, c, request(t, want.method, "http://"+address+path, nil))
		if r.StatusCode != want.status || body != want.body || r.Header.Get("Content-Length") != want.length ||
			r.Header.Get("Content-Type") != want.contentType {
			t.Errorf("%s: got %d %q, length %q, type %q; want %+v", path, r.StatusCode, body, r.Header.Get("Content-Length"),
				r.Header.Get("Content-Type"), want)
		}
		if _, err := time.Parse(http.TimeFormat, r.Header.Get("Date")); err != nil {
			t.Errorf("%s: Date: %v", path, err)
		}
		for _, name := range []string{"X-Late", "X-Bad", "Connection"} {
			if v := r.Header.Get(name); v != "" {
				t.Errorf("%s: %s = %q, want none", path, name, v)
			}
		}
		if strings.HasSuffix(path, "trailers") && r.Trailer.Get("X-Other") != "2" || path == "/trailers" && r.Trailer.Get("X-Announced") != "1" {
			t.Errorf("%s: trailer = %v", path, r.Trailer)
		}
		if path == "/large-header" && len(r.Header.Get("X-Large")) != 40_000 {
			t.Errorf("%s: header of %d bytes, want 40000", path, len(r.Header.Get("X-Large")))
		}
	}
}

// TestRequests checks what a handler sees of a request.
func TestRequests(t *testing.T) {
	seen := make(chan *http.Request, 1)
	_, address := start(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		seen <- r
	})))
	c := dialRaw(t, address)
	c.request(1, false, "cookie", "a=1", "cookie", "b=2", "x-many", "1", "x-many", "2", "te", "trailers", "trailer", "x-end", "content-length",
		"4")
	c.write(c.framer.WriteDataPadded(1, false, []byte("body"), make([]byte, 100)))
	c.trailer(1)
	c.write(c.send())
	r := <-seen
	got := fmt.Sprint(r.Method, r.URL, r.RequestURI, r.Host, r.Proto, r.ContentLength, r.Header, r.Trailer) + r.RemoteAddr
	want := fmt.Sprint("POST", "/", "/", "test", "HTTP/2.0", 4, http.Header{
		"Cookie": {"a=1; b=2"}, "X-Many": {"1", "2"}, "Te": {"trailers"}, "Content-Length": {"4"},
	}, http.Header{"X-End": {"yes"}}) + c.conn.LocalAddr().String()
	if got != want {
		t.Errorf("request = %s, want %s", got, want)
	}
	if local := r.Context().Value(http.LocalAddrContextKey).(net.Addr).String(); local != address {
		t.Errorf("local address = %s, want %s", local, address)
	}
}

// TestEcho checks that large bodies pass in both directions at once, in spite of the windows.
func TestEcho(t *testing.T) {
	config := testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n, err := io.Copy(w, r.Body); err != nil {
			t.Errorf("echo = %d, %v", n, err)
		}
	}))
	config.StreamWindow, config.ConnWindow = 65535, 100_000
	_, address := start(t, config)
	c := client(t)
	body := make([]byte, 5<<20)
	_, _ = rand.Read(body)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			response, err := c.Do(request(t, "POST", "http://"+address, bytes.NewReader(body)))
			if err != nil {
				t.Error(err)
				return
			}
			defer response.Body.Close()
			if got, err := io.ReadAll(response.Body); err != nil || !bytes.Equal(got, body) {
				t.Errorf("echo of %d bytes = %d bytes, %v", len(body), len(got), err)
			}
		})
	}
	wg.Wait()
}

// TestUnreadBody checks that an answer before the end of the request ends the request, and gives its window back.
func TestUnreadBody(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	c := client(t)
	for range 20 { // more than the connection's window
		r, body := get(t, c, request(t, "POST", "http://"+address, bytes.NewReader(make([]byte, 1<<20))))
		if r.StatusCode != 200 || body != "" {
			t.Fatalf("response = %d %q", r.StatusCode, body)
		}
	}
	raw := dialRaw(t, address)
	raw.request(1, false)
	raw.write(raw.send())
	raw.wantReset(1, http2.ErrCodeNo)
	for range 2000 { // data that is on its way is no flood
		raw.write(raw.framer.WriteData(1, false, []byte("x")))
	}
	raw.request(3, true)
	raw.write(raw.send())
	for {
		f, err := raw.next()
		if err != nil {
			t.Fatal(err)
		}
		if f, ok := f.(*http2.MetaHeadersFrame); ok && f.StreamID == 3 {
			break
		}
	}
}

// TestExpectContinue checks that 100 Continue is sent when the handler reads the body, and that other 1xx responses pass.
func TestExpectContinue(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</style.css>")
		w.WriteHeader(http.StatusEarlyHints)
		_, _ = io.Copy(w, r.Body)
	})))
	r := request(t, "POST", "http://"+address, strings.NewReader("body"))
	r.Header.Set("Expect", "100-continue")
	var codes []int
	r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
			codes = append(codes, code)
			return nil
		},
	}))
	c := client(t)
	c.Transport.(*http.Transport).ExpectContinueTimeout = 30 * time.Second
	if _, body := get(t, c, r); body != "body" || fmt.Sprint(codes) != "[103 100]" {
		t.Errorf("response = %q after %v, want body after [103 100]", body, codes)
	}
}

// TestPanic checks that a panic resets only its stream.
func TestPanic(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Panic") != "" {
			fmt.Fprint(w, "begun")
			w.(http.Flusher).Flush()
			panic("a test")
		}
	})))
	c := dialRaw(t, address)
	c.request(1, true, "x-panic", "yes")
	c.request(3, true)
	c.write(c.send())
	reset, answered := false, false
	for !reset || !answered {
		f, err := c.next()
		if err != nil {
			t.Fatal(err)
		}
		switch f := f.(type) {
		case *http2.RSTStreamFrame:
			reset = f.StreamID == 1 && f.ErrCode == http2.ErrCodeInternal
		case *http2.MetaHeadersFrame:
			answered = answered || f.StreamID == 3
		}
	}
}

// TestDeadlines checks that deadlines end reads and writes that wait for the client, and not those of what is there.
func TestDeadlines(t *testing.T) {
	results := make(chan error, 1)
	_, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		soon := time.Now().Add(50 * time.Millisecond)
		var err error
		switch r.Header.Get("X-Test") {
		case "read":
			_ = control.SetReadDeadline(soon)
			_, err = io.ReadAll(r.Body)
		case "interrupt":
			time.AfterFunc(50*time.Millisecond, func() { _ = control.SetReadDeadline(time.Now()) })
			_, err = io.ReadAll(r.Body)
		case "write":
			_ = control.SetWriteDeadline(soon)
			_, err = w.Write(make([]byte, 1<<20))
		case "whole":
			_ = control.SetReadDeadline(time.Now().Add(-time.Second))
			_, err = io.ReadAll(r.Body)
		case "moved":
			_ = control.SetReadDeadline(soon)
			_ = control.SetReadDeadline(time.Time{})
			time.Sleep(100 * time.Millisecond) // pacing: the deadline that was taken back passes, and nothing must happen
			_, err = r.Body.Read(nil)
		}
		results <- err
	})))
	c := dialRaw(t, address)
	for i, test := range []struct {
		name  string
		whole bool
		want  error
	}{
		{"read", false, os.ErrDeadlineExceeded}, {"interrupt", false, os.ErrDeadlineExceeded}, {"write", false, os.ErrDeadlineExceeded},
		{"whole", true, nil}, {"moved", false, nil},
	} {
		id := uint32(2*i + 1)
		c.request(id, test.whole, "x-test", test.name)
		c.write(c.send())
		if err := <-results; !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
		if test.name == "write" {
			c.wantReset(id, http2.ErrCodeInternal)
		}
	}
}

// TestClientReset checks that a reset, and the end of the connection, end the request's context and its reads.
func TestClientReset(t *testing.T) {
	results := make(chan error, 1)
	_, address := start(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		<-r.Context().Done()
		results <- err
	})))
	c := dialRaw(t, address)
	c.request(1, false)
	c.write(c.framer.WriteRSTStream(1, http2.ErrCodeCancel))
	c.request(3, false)
	c.write(c.send())
	if err := <-results; err == nil || !strings.Contains(err.Error(), "cancel") {
		t.Errorf("read after a reset = %v, want its code", err)
	}
	c.conn.Close()
	if err := <-results; err == nil {
		t.Error("a read succeeds after the end of the connection")
	}
}

// TestLargeHeaders checks that a header over the limit is refused alone: in one field, in many, and in CONTINUATION
// frames. One that is far over it ends the connection.
func TestLargeHeaders(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	var many []string
	for i := range 2000 {
		many = append(many, fmt.Sprintf("x-%d", i), strings.Repeat("y", 50))
	}
	for name, fields := range map[string][]string{"one": {"x-long", strings.Repeat("x", 100_000)}, "many": many,
		"long in hpack": {"x-long", strings.Repeat("~", 120_000)}} {
		c := dialRaw(t, address)
		c.block.Reset()
		for i, fs := range [][]string{nil, fields, nil} {
			c.requestInPieces(uint32(2*i+1), fs...)
		}
		c.write(c.send())
		got := map[uint32]string{}
		for len(got) < 3 {
			f, err := c.next()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if f, ok := f.(*http2.MetaHeadersFrame); ok {
				got[f.StreamID] = f.PseudoValue("status")
			}
		}
		if fmt.Sprint(got) != "map[1:200 3:431 5:200]" {
			t.Errorf("%s: statuses = %v", name, got)
		}
	}
	c := dialRaw(t, address)
	c.requestInPieces(1, "x-long", strings.Repeat("~", 2<<20))
	_ = c.send() // the server may have closed the connection
	if f, err := c.next(); err == nil {
		if _, ok := f.(*http2.GoAwayFrame); !ok {
			t.Errorf("answer to a header of 2 MiB = %v, want GOAWAY", f)
		}
	}
}

// requestInPieces writes a request whose header is in frames of the allowed size.
func (c *rawClient) requestInPieces(id uint32, fields ...string) {
	c.t.Helper()
	c.block.Reset()
	list := append([]string{":method", "POST", ":scheme", "http", ":path", "/", ":authority", "test"}, fields...)
	for i := 0; i < len(list); i += 2 {
		c.write(c.hpack.WriteField(hpackField(list[i], list[i+1])))
	}
	b := c.block.Bytes()
	first := b[:min(len(b), maxFrame)]
	b = b[len(first):]
	c.write(c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndHeaders: len(b) == 0, EndStream: true}))
	for len(b) > 0 {
		next := b[:min(len(b), maxFrame)]
		b = b[len(next):]
		c.write(c.framer.WriteContinuation(id, len(b) == 0, next))
	}
}

// TestShutdown checks that a connection serves what its client began before it saw GOAWAY, and then ends.
func TestShutdown(t *testing.T) {
	entered, release := make(chan struct{}, 2), make(chan struct{})
	s, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		entered <- struct{}{}
		<-release
		fmt.Fprint(w, "done")
	})))
	c := dialRaw(t, address)
	c.request(1, true)
	c.write(c.send())
	<-entered
	down := make(chan error, 1)
	go func() { down <- s.Shutdown(t.Context()) }()
	c.wantGoAway(http2.ErrCodeNo)
	c.request(3, true) // the client has sent it before it saw GOAWAY
	c.write(c.send())
	<-entered
	close(release)
	f, err := c.next()
	for ; err == nil; f, err = c.next() {
		if p, ok := f.(*http2.PingFrame); ok {
			c.write(c.framer.WritePing(true, p.Data))
			c.write(c.send())
		}
	}
	if !errors.Is(err, io.EOF) {
		t.Errorf("end of the connection = %v, want EOF", err)
	}
	c.conn.Close()
	if err := <-down; err != nil {
		t.Errorf("Shutdown = %v", err)
	}
}

// TestSilentClients checks that clients that answer no ping, send no preface or have no request are disconnected.
func TestSilentClients(t *testing.T) {
	config := testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	config.PrefaceTimeout, config.IdleTimeout = 100*time.Millisecond, 400*time.Millisecond
	config.PingAfter, config.GoneAfter = 100*time.Millisecond, 200*time.Millisecond
	_, address := start(t, config)
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a client without a preface is not disconnected")
	}
	gone := dialRaw(t, address)
	gone.request(1, true)
	gone.write(gone.send())
	pinged := false
	for {
		f, err := gone.next()
		if err != nil {
			break
		}
		_, isPing := f.(*http2.PingFrame)
		pinged = pinged || isPing
	}
	if !pinged {
		t.Error("a silent client was not pinged")
	}
	config.PingAfter, config.GoneAfter = time.Minute, 2*time.Minute
	_, address = start(t, config)
	idle := dialRaw(t, address)
	idle.request(1, true)
	idle.write(idle.framer.WriteRSTStream(1, http2.ErrCodeCancel))
	idle.write(idle.send())
	idle.wantGoAway(http2.ErrCodeNo)
}

// TestInadequateSecurity checks that a connection with a cipher suite that HTTP/2 prohibits is refused by name.
func TestInadequateSecurity(t *testing.T) {
	state := &tls.ConnectionState{Version: tls.VersionTLS12, CipherSuite: tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA}
	_, address := startOver(t, testConfig(http.NotFoundHandler()), state)
	c := dialRaw(t, address)
	c.wantGoAway(http2.ErrCodeInadequateSecurity)
}

// TestContextOfRequest checks that a request's context ends with the handler, and carries the values of Serve's.
func TestContextOfRequest(t *testing.T) {
	var ctx context.Context
	_, address := start(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { ctx = r.Context() })))
	get(t, client(t), request(t, "GET", "http://"+address, nil))
	select {
	case <-ctx.Done():
	case <-time.After(10 * time.Second):
		t.Error("the context has not ended")
	}
}
