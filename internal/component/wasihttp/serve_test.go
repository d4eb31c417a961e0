package wasihttp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/wasi"
)

// both runs a test over HTTP/1.1 and HTTP/2.
func both(t *testing.T, test func(t *testing.T, h2 bool)) {
	t.Run("HTTP/1.1", func(t *testing.T) { test(t, false) })
	t.Run("HTTP/2", func(t *testing.T) { test(t, true) })
}

func do(t *testing.T, server *httptest.Server, r *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := server.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

func request(t *testing.T, method, url string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func want(t *testing.T, o outcome, err error) {
	t.Helper()
	if !errors.Is(o.err, err) || (err == nil) != (o.err == nil) {
		t.Errorf("Serve: error %v, want %v", o.err, err)
	}
}

func TestRequestReachesTheGuest(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		server, outcomes := serve(t, h2, func(g *guest, q, out uint32) {
			headers := g.call(types, "[method]incoming-request.headers", u32(q)).U32()
			entries := g.call(types, "[method]fields.entries", u32(headers))
			var list []string
			for range entries.Len() {
				list = append(list, entries.String()+"="+entries.String())
			}
			if isOK(g.call(types, "[method]fields.append", u32(headers), str("a"), str("b"))) {
				g.t.Error("the guest could change the request's fields")
			}
			method := g.call(types, "[method]incoming-request.method", u32(q))
			m := method.U32()
			scheme, path, authority := g.call(types, "[method]incoming-request.scheme", u32(q)),
				g.call(types, "[method]incoming-request.path-with-query", u32(q)),
				g.call(types, "[method]incoming-request.authority", u32(q))
			scheme.Option()
			path.Option()
			authority.Option()
			body := g.respond(out, 203, "content-type", "text/x", "te", "trailers", "x-two", "1", "x-two", "2")
			g.write(g.stream(body), fmt.Sprintf("%d %d %s %s %s", m, scheme.U32(), path.String(), authority.String(), strings.Join(list, " ")))
			if !g.finish(body) {
				g.t.Error("outgoing-body.finish failed")
			}
			first, second := g.call(types, "[method]incoming-request.consume", u32(q)), g.call(types, "[method]incoming-request.consume", u32(q))
			if !isOK(first) || isOK(second) {
				g.t.Error("consume must succeed once, and then fail")
			}
		})
		r := request(t, "DELETE", server.URL+"/a%20b?c=d", nil)
		r.Header = http.Header{"X-Name": {"one", "two"}, "User-Agent": {"test"}, "Accept-Encoding": {"identity"}, "Te": {"trailers"}}
		resp, got := do(t, server, r)
		scheme := 0
		if h2 {
			scheme = 1
		}
		if want := fmt.Sprintf("4 %d /a%%20b?c=d %s accept-encoding=identity te=trailers user-agent=test x-name=one x-name=two", scheme,
			server.Listener.Addr()); got != want {
			t.Errorf("the guest saw\n%s\nwant\n%s", got, want)
		}
		if resp.StatusCode != 203 || resp.Header.Get("Content-Type") != "text/x" || len(resp.Header["X-Two"]) != 2 || resp.Header["Te"] != nil {
			t.Errorf("got status %d and header %v, want 203, Content-Type text/x, two values of X-Two and no TE", resp.StatusCode, resp.Header)
		}
		// -1: the guest's first write was sent before it finished the body.
		if resp.ContentLength != -1 && resp.ContentLength != int64(len(got)) {
			t.Errorf("got a content length of %d for a body of %d bytes", resp.ContentLength, len(got))
		}
		want(t, <-outcomes, nil)
	})
}

// TestBodiesAreStreamed echoes more than fits into all buffers.
func TestBodiesAreStreamed(t *testing.T) {
	data := make([]byte, 8<<20)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	both(t, func(t *testing.T, h2 bool) {
		server, outcomes := serve(t, h2, func(g *guest, q, out uint32) {
			_, in := g.input(q)
			body := g.respond(out, 200)
			to := g.stream(body)
			for piece, more := g.read(in); more; piece, more = g.read(in) {
				for len(piece) > 0 {
					n := min(len(piece), 4096)
					if !g.write(to, piece[:n]) {
						return
					}
					piece = piece[n:]
				}
			}
			g.finish(body)
		})
		_, got := do(t, server, request(t, "POST", server.URL, bytes.NewReader(data)))
		if sha256.Sum256([]byte(got)) != sha256.Sum256(data) {
			t.Errorf("got %d bytes of %d, or different ones", len(got), len(data))
		}
		want(t, <-outcomes, nil)
	})
}

// TestResponseBeforeBody uses a guest that asks for the request's body after the header of its response has been sent.
func TestResponseBeforeBody(t *testing.T) {
	data := strings.Repeat("0123456789abcdef", 1<<12) // few enough for net/http to discard them
	both(t, func(t *testing.T, h2 bool) {
		begun := make(chan struct{})
		server, outcomes := serve(t, h2, func(g *guest, q, out uint32) {
			body := g.respond(out, 200)
			to := g.stream(body)
			g.write(to, "begun\n")
			g.ok(g.call(streams, "[method]output-stream.blocking-flush", u32(to)))
			<-begun
			n := 0
			_, in := g.input(q)
			for piece, more := g.read(in); more; piece, more = g.read(in) {
				n += len(piece)
			}
			g.write(to, fmt.Sprint(n))
			g.finish(body)
		})
		r := request(t, "POST", server.URL, strings.NewReader(data))
		trace := &httptrace.ClientTrace{GotFirstResponseByte: func() { close(begun) }}
		_, got := do(t, server, r.WithContext(httptrace.WithClientTrace(r.Context(), trace)))
		if want := fmt.Sprint("begun\n", len(data)); got != want {
			t.Errorf("the guest answered %q, want %q", got, want)
		}
		want(t, <-outcomes, nil)
	})
}

// TestPiecesArrive uses guests that write without blocking. Servers in JavaScript then wait, in blocking-flush, until that is
// sent; guests that copy a stream do not flush.
func TestPiecesArrive(t *testing.T) {
	for name, flush := range map[string]bool{"blocking-flush": true, "no flush": false} {
		t.Run(name, func(t *testing.T) { testPieces(t, flush) })
	}
}

func testPieces(t *testing.T, flush bool) {
	both(t, func(t *testing.T, h2 bool) {
		received := make(chan struct{})
		server, outcomes := serve(t, h2, func(g *guest, q, out uint32) {
			body := g.respond(out, 200)
			to := g.stream(body)
			for i := range 3 {
				g.ok(g.call(streams, "[method]output-stream.write", u32(to), str(fmt.Sprintf("%d\n", i))))
				if flush {
					g.ok(g.call(streams, "[method]output-stream.blocking-flush", u32(to)))
				}
				<-received
			}
			g.finish(body)
		})
		resp, err := server.Client().Do(request(t, "GET", server.URL, nil))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		lines := bufio.NewReader(resp.Body)
		for i := range 3 {
			if line, err := lines.ReadString('\n'); err != nil || line != fmt.Sprintf("%d\n", i) {
				t.Errorf("got %q, %v; want %d", line, err, i)
			}
			received <- struct{}{}
		}
		want(t, <-outcomes, nil)
	})
}

// TestPollingGuest uses a guest that blocks only in poll: it reads and writes what it can, in both directions.
func TestPollingGuest(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		server, outcomes := serve(t, h2, func(g *guest, q, out uint32) {
			_, in := g.input(q)
			body := g.respond(out, 200)
			to := g.stream(body)
			readable := g.call(streams, "[method]input-stream.subscribe", u32(in)).U32()
			writable := g.call(streams, "[method]output-stream.subscribe", u32(to)).U32()
			for {
				g.call(polls, "poll", u32(1), u32(readable))
				r := g.call(streams, "[method]input-stream.read", u32(in), u64(1000))
				if !isOK(r) {
					break
				}
				piece := r.String()
				for len(piece) > 0 {
					g.call(polls, "[method]pollable.block", u32(writable))
					n := min(len(piece), int(g.ok(g.call(streams, "[method]output-stream.check-write", u32(to))).U64()))
					g.ok(g.call(streams, "[method]output-stream.write", u32(to), str(piece[:n])))
					g.ok(g.call(streams, "[method]output-stream.flush", u32(to)))
					piece = piece[n:]
				}
			}
			g.ok(g.call(streams, "[method]output-stream.blocking-flush", u32(to)))
			g.finish(body)
		})
		// Each piece must come back before the next is sent.
		r, w := io.Pipe()
		go func() { _, _ = io.WriteString(w, "0\n") }()
		resp, err := server.Client().Do(request(t, "POST", server.URL, r))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		lines := bufio.NewReader(resp.Body)
		for i := range 100 {
			line, err := lines.ReadString('\n')
			if err != nil || line != fmt.Sprintf("%d\n", i) {
				t.Fatalf("got %q, %v; want %d", line, err, i)
			}
			if i == 99 {
				break
			}
			if _, err := fmt.Fprintf(w, "%d\n", i+1); err != nil {
				t.Fatal(err)
			}
		}
		w.Close()
		_, _ = io.Copy(io.Discard, lines)
		<-outcomes
	})
}

func TestTrailers(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		server, outcomes := serve(t, h2, func(g *guest, q, out uint32) {
			in, _ := g.input(q)
			future := g.call(types, "[static]incoming-body.finish", u32(in)).U32()
			p := g.call(types, "[method]future-trailers.subscribe", u32(future)).U32()
			g.call(polls, "[method]pollable.block", u32(p))
			r := g.call(types, "[method]future-trailers.get", u32(future))
			if !r.Option() || !isOK(r) || !isOK(r) || !r.Option() {
				g.t.Error("future-trailers.get returned no trailers")
				return
			}
			values := g.call(types, "[method]fields.get", u32(r.U32()), str("x-sum"))
			if again := g.call(types, "[method]future-trailers.get", u32(future)); !again.Option() || isOK(again) {
				g.t.Error("future-trailers.get returned the trailers twice")
			}
			body := g.respond(out, 200)
			g.write(g.stream(body), "body")
			if values.Len() != 1 || !g.finish(body, "x-sum", values.String(), "x-more", "1") {
				g.t.Error("there is not exactly one x-sum, or finish with trailers failed")
			}
		})
		r := request(t, "POST", server.URL, io.MultiReader(strings.NewReader("some"), strings.NewReader("thing")))
		r.Trailer = http.Header{"X-Sum": {"42"}}
		resp, body := do(t, server, r)
		if body != "body" || resp.Trailer.Get("X-Sum") != "42" || resp.Trailer.Get("X-More") != "1" {
			t.Errorf("body %q, trailers %v; want body, X-Sum 42, X-More 1", body, resp.Trailer)
		}
		want(t, <-outcomes, nil)
	})
}

// TestFirstBytesDoNotWait: flushed bytes reach the client while the guest waits for something else, and so does the
// header of a response without a body yet.
func TestFirstBytesDoNotWait(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		next := make(chan struct{})
		server, outcomes := serve(t, h2, func(g *guest, _, out uint32) {
			body := g.respond(out, 200, "content-type", "text/event-stream")
			<-next
			to := g.stream(body)
			for i := range 3 {
				g.write(to, fmt.Sprintf("data: %d\n", i))
				<-next
			}
			g.finish(body)
		})
		resp, err := server.Client().Do(request(t, "GET", server.URL, nil))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		next <- struct{}{}
		lines := bufio.NewReader(resp.Body)
		for i := range 3 {
			if line, err := lines.ReadString('\n'); err != nil || line != fmt.Sprintf("data: %d\n", i) {
				t.Fatalf("got %q, %v; want data: %d", line, err, i)
			}
			next <- struct{}{}
		}
		want(t, <-outcomes, nil)
	})
}

func TestInformationalResponses(t *testing.T) {
	server, outcomes := serve(t, false, func(g *guest, _, out uint32) {
		g.ok(g.call(types, "[method]response-outparam.send-informational", u32(out), u16(103), u32(g.fields("link", "</style.css>"))))
		if isOK(g.call(types, "[method]response-outparam.send-informational", u32(out), u16(200), u32(g.fields()))) {
			g.t.Error("send-informational accepted status 200")
		}
		for _, status := range []uint16{100, 101, 103} { // not final
			response := g.call(types, "[constructor]outgoing-response", u32(g.fields())).U32()
			if isOK(g.call(types, "[method]outgoing-response.set-status-code", u32(response), u16(status))) {
				g.t.Errorf("set-status-code accepted %d", status)
			}
			g.state.Drop(response)
		}
		g.finish(g.respond(out, 204))
	})
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	all, _ := io.ReadAll(conn)
	if first, second, ok := strings.Cut(string(all), "\r\n\r\n"); !ok || !strings.HasPrefix(first, "HTTP/1.1 103") ||
		!strings.Contains(first, "Link: </style.css>") ||
		!strings.HasPrefix(second, "HTTP/1.1 204") || strings.Contains(second, "Link") {
		t.Errorf("wrong responses:\n%s", all)
	}
	want(t, <-outcomes, nil)
}

// TestSessionServesManyRequests: a reused instance can serve several requests.
func TestSessionServesManyRequests(t *testing.T) {
	s := NewSession(wasi.Options{})
	defer s.Close()
	for i := range 100 {
		w := httptest.NewRecorder()
		err := s.Serve(w, httptest.NewRequest("POST", "/", strings.NewReader("ping")), func(ctx context.Context, params []byte) error {
			return play(&guest{t, ctx, s}, params, func(g *guest, q, out uint32) {
				b, in := g.input(q)
				piece, _ := g.read(in)
				body := g.respond(out, 200)
				to := g.stream(body)
				g.write(to, piece+"-pong")
				for _, rep := range []uint32{q, in, b, to} {
					s.state.Drop(rep)
				}
				g.finish(body)
			})
		})
		if err != nil || w.Body.String() != "ping-pong" {
			t.Fatalf("request %d: body %q, error %v; want ping-pong", i, w.Body, err)
		}
	}
}

// TestNothingIsLeft: requests that end in any wrong way leak no goroutine and no connection's memory.
func TestNothingIsLeft(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		server, outcomes := serve(t, h2, func(g *guest, q, out uint32) {
			_, in := g.input(q)
			p := g.call(streams, "[method]input-stream.subscribe", u32(in)).U32()
			g.call(polls, "[method]pollable.ready", u32(p)) // starts to read ahead
			g.write(g.stream(g.respond(out, 200)), "some")
			panic(trap{errors.New("boom")})
		})
		ask := func() {
			body, w := io.Pipe()
			go func() {
				<-outcomes
				w.Close() // because a client waits for its own body before it reports an error
			}()
			resp, err := server.Client().Do(request(t, "POST", server.URL, body))
			if err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}
		ask()
		before := runtime.NumGoroutine()
		for range 50 {
			ask()
		}
		server.CloseClientConnections()
		deadline := time.Now().Add(10 * time.Second)
		for runtime.NumGoroutine() > before+5 {
			if time.Now().After(deadline) {
				t.Fatalf("%d goroutines at the end, want at most %d", runtime.NumGoroutine(), before)
			}
			time.Sleep(10 * time.Millisecond) // pacing of a poll
		}
	})
}

// TestBodyBeforeResponse checks that a guest can write a body of some size before it sets its response, that a body over
// the window fails without a trap, and that what is written counts until the body has ended.
func TestBodyBeforeResponse(t *testing.T) {
	piece := strings.Repeat("x", 4096)
	server, outcomes := serve(t, false, func(g *guest, _, out uint32) {
		response := g.call(types, "[constructor]outgoing-response", u32(g.fields())).U32()
		body := g.ok(g.call(types, "[method]outgoing-response.body", u32(response))).U32()
		stream := g.stream(body)
		for range 300 << 10 / 4096 {
			if !g.write(stream, piece) {
				panic(trap{errors.New("a write before the response fails")})
			}
		}
		g.call(types, "[static]response-outparam.set", u32(out), u32(0), u32(response))
		g.state.Drop(stream)
		g.finish(body)
	})
	response, text := do(t, server, request(t, "GET", server.URL, nil))
	if err := (<-outcomes).err; err != nil || response.StatusCode != http.StatusOK || len(text) != 300<<10 {
		t.Errorf("response = %s with %d bytes, %v; want 200 with %d", response.Status, len(text), err, 300<<10)
	}
	g, m := metered(t, nil)
	owner := g.call(types, "[constructor]outgoing-response", u32(g.fields())).U32()
	body := g.ok(g.call(types, "[method]outgoing-response.body", u32(owner))).U32()
	stream, n := g.stream(body), 0
	for g.write(stream, piece) {
		n += 4096
	}
	if n != earlyWindow || m.Load() < int64(n) {
		t.Errorf("the stream took %d bytes, and %d count; want %d", n, m.Load(), earlyWindow)
	}
}
