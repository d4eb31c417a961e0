package wasihttp

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/test/accept"
)

// meter is a wasi.Quota without a limit.
type meter struct{ atomic.Int64 }

func (m *meter) Take(n int64) bool { m.Add(n); return true }
func (m *meter) Give(n int64)      { m.Add(-n) }

// metered is a guest with a meter of the bytes that the host holds for it.
func metered(t testing.TB, transport http.RoundTripper) (*guest, *meter) {
	m := &meter{}
	s := NewSession(wasi.Options{HTTP: transport, Bytes: m})
	t.Cleanup(func() {
		s.Close()
		if n := m.Load(); n != 0 {
			t.Errorf("%d bytes are held after the end of the instance", n)
		}
	})
	return &guest{t, t.Context(), s}, m
}

// smallFields writes fields with short, distinct names that need about n bytes on the wire.
func smallFields(n int) string {
	const letters = "abcdefghijklmnopqrstuvwxyz"
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%c%c%c:\n", letters[i%26], letters[i/26%26], letters[i/26/26%26])
	}
	return b.String()
}

// rawServer answers each connection with the given text.
func rawServer(t testing.TB, answer string) (url string) {
	return "http://" + accept.Loopback(t, func(conn net.Conn) {
		conn.Read(make([]byte, 4096))
		io.WriteString(conn, answer)
	}) + "/"
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestOutgoingHeadersCount: what the host keeps of responses counts at least as much as it needs, and is bounded.
func TestOutgoingHeadersCount(t *testing.T) {
	transport := &http.Transport{DisableKeepAlives: true}
	g, m := metered(t, transport)
	url := rawServer(t, "HTTP/1.1 200 OK\nContent-Length: 0\n"+smallFields(60<<10)+"\n")
	var responses []uint32
	heapBefore := heap()
	for {
		future, code := g.send(g.request(get, url))
		if code != "" {
			t.Fatal(code)
		}
		response, code := g.answer(future)
		if code == "HTTP-response-header-section-size" {
			g.state.Drop(future)
			break
		}
		if code != "" || len(responses) > 100 {
			t.Fatalf("response %d: %q", len(responses), code)
		}
		responses = append(responses, response, future)
	}
	if used, counted := heap()-heapBefore, m.Load(); used > counted || len(responses) < 10 {
		t.Errorf("%d responses use %d bytes and count %d", len(responses)/2, used, counted)
	}
	for _, r := range responses {
		g.state.Drop(r)
	}
	if n := m.Load(); n != 0 {
		t.Errorf("%d bytes are held after the guest dropped the responses", n)
	}
}

// TestOutgoingHeaderTooLarge: the transport refuses the header before it counts.
func TestOutgoingHeaderTooLarge(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) {
			for _, name := range []string{"A", "B", "C"} { // each fits
				w.Header().Set(name, strings.Repeat("x", 3<<10))
			}
		})
		transport := transportTo(t, server)
		transport.MaxResponseHeaderBytes = 8 << 10
		if _, _, code := caller(t, transport).fetch(server.URL + "/"); code != "HTTP-response-header-section-size" {
			t.Errorf("fetch() = %s, want HTTP-response-header-section-size", code)
		}
	})
}

// TestOutgoingTrailersCount: so do the trailers, which arrive later, and their names, which arrive earlier.
func TestOutgoingTrailersCount(t *testing.T) {
	trailers := smallFields(30 << 10)
	g, m := metered(t, &http.Transport{DisableKeepAlives: true, ReadBufferSize: 64 << 10})
	announced := "Trailer: " + strings.ReplaceAll(strings.TrimSuffix(trailers, ":\n"), ":\n", ",") + "\n"
	for name, c := range map[string]struct{ header, trailers string }{"values": {"", trailers}, "names": {announced, ""}} {
		url := rawServer(t, "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n"+c.header+"\n0\r\n"+strings.ReplaceAll(c.trailers, "\n",
			"\r\n")+"\r\n")
		future, _ := g.send(g.request(get, url))
		response, code := g.answer(future)
		if code != "" {
			t.Fatal(code)
		}
		body, in := g.incoming(response)
		g.readAll(in)
		if n := m.Load(); n < CallSize+6000*fieldCost {
			t.Errorf("%s: a response with more than 6000 trailers counts %d bytes", name, n)
		}
		for _, r := range []uint32{in, body, response, future} {
			g.state.Drop(r)
		}
		if n := m.Load(); n != 0 {
			t.Errorf("%s: %d bytes are held after the guest dropped the response", name, n)
		}
	}

	// The trailers do not fit.
	url := rawServer(t, "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n0\r\n"+strings.ReplaceAll(trailers, "\n", "\r\n")+"\r\n")
	future, _ := g.send(g.request(get, url))
	response, code := g.answer(future)
	if code != "" {
		t.Fatal(code)
	}
	body, in := g.incoming(response)
	defer g.fill()()
	g.readAll(in)
	g.state.Drop(in)
	r := g.call(types, "[method]future-trailers.get", u32(g.call(types, "[static]incoming-body.finish", u32(body)).U32()))
	if !r.Option() || !isOK(r) || isOK(r) {
		t.Fatal("the guest got trailers beyond its limit")
	}
	if code := readCode(r).Code; code != "HTTP-response-trailer-section-size" {
		t.Errorf("future-trailers.get = %s, want HTTP-response-trailer-section-size", code)
	}
}

// fill makes the guest hold as much as it may, except for some KiB. It returns a function that undoes this.
func (g *guest) fill() (undo func()) {
	n := 0
	for g.state.Hold(8 << 10) {
		n += 8 << 10
	}
	return func() { g.state.Hold(-n) }
}

// TestOutgoingRequestTrailersCount: the call keeps the trailers, and the guest the fields.
func TestOutgoingRequestTrailersCount(t *testing.T) {
	g, m := metered(t, roundTrip(func(r *http.Request) (*http.Response, error) {
		_, err := io.Copy(io.Discard, r.Body)
		return nil, cmp.Or(err, errors.New("no response"))
	}))
	for _, full := range []bool{false, true} {
		q := g.request(post, "http://host/", "trailer", "x-last")
		body, stream := g.outBody(q)
		future, code := g.send(q)
		if code != "" {
			t.Fatal(code)
		}
		g.state.Drop(stream)
		value := strings.Repeat("x", 100<<10)
		trailers, before := g.fields("x-last", value), m.Load()
		undo := func() {}
		if full {
			undo = g.fill()
		}
		r := g.call(types, "[static]outgoing-body.finish", u32(body), some(u32(trailers)))
		undo()
		switch finished := isOK(r); {
		case finished == full:
			t.Errorf("outgoing-body.finish is ok: %t, the limit is reached: %t", finished, full)
		case full && readCode(r).Code != "HTTP-request-trailer-section-size":
			t.Error("outgoing-body.finish did not fail with HTTP-request-trailer-section-size")
		case !full && m.Load() < before:
			t.Errorf("%d bytes are held after finish, want at least %d", m.Load(), before)
		}
		g.state.Drop(future)
	}
}

// TestOutgoingRequestsCount: a call keeps its request, whose headers and path the guest no longer holds.
func TestOutgoingRequestsCount(t *testing.T) {
	g, m := metered(t, roundTrip(func(r *http.Request) (*http.Response, error) {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}))
	big := strings.Repeat("x", 1<<19)
	for n := 0; ; n++ {
		q := g.request(post, "http://"+big+"/", "a", big, "trailer", "x-last")
		body, _ := g.outBody(q)
		g.finish(body, "x-last", big)
		_, code := g.send(q)
		if code == "connection-limit-reached" {
			break
		}
		if code != "" || n > 20 {
			t.Fatalf("call %d: %q", n, code)
		}
		if counted, want := m.Load(), int64(n+1)*(CallSize+3*int64(len(big))); counted < want {
			t.Fatalf("%d calls count %d bytes, want at least %d", n+1, counted, want)
		}
	}
}

// TestUnsentBodiesAreReleased: a body that loses its request or response is of no use.
func TestUnsentBodiesAreReleased(t *testing.T) {
	g, m := metered(t, nil) // each request is denied
	text := strings.Repeat("x", 64<<10)
	newRequest := func() (owner, body uint32) {
		owner = g.request(post, "http://host/")
		return owner, g.ok(g.call(types, "[method]outgoing-request.body", u32(owner))).U32()
	}
	newResponse := func() (owner, body uint32) {
		owner = g.call(types, "[constructor]outgoing-response", u32(g.fields())).U32()
		return owner, g.ok(g.call(types, "[method]outgoing-response.body", u32(owner))).U32()
	}
	write := func(body uint32) (stream uint32) {
		stream = g.stream(body)
		g.call(streams, "[method]output-stream.write", u32(stream), str(text))
		return stream
	}
	finished := func(makeOwner func() (owner, body uint32), lose func(owner uint32)) func() []uint32 {
		return func() []uint32 {
			owner, body := makeOwner()
			stream := write(body)
			g.finish(body, "a", text)
			lose(owner)
			return []uint32{stream}
		}
	}
	for name, lose := range map[string]func() (left []uint32){
		"dropped request":  finished(newRequest, g.state.Drop),
		"dropped response": finished(newResponse, g.state.Drop),
		"denied request": finished(newRequest, func(q uint32) {
			if _, code := g.send(q); code != "HTTP-request-denied" {
				t.Errorf("send() = %s, want HTTP-request-denied", code)
			}
		}),
		"unfinished body": func() []uint32 {
			q, body := newRequest()
			stream := write(body)
			g.state.Drop(q)
			return []uint32{stream, body}
		},
		"stream after the request": func() []uint32 {
			q, body := newRequest()
			g.state.Drop(q)
			stream := g.stream(body)
			if r := g.call(streams, "[method]output-stream.check-write", u32(stream)); isOK(r) {
				t.Error("the stream of a body without a request accepts bytes")
			}
			g.finish(body, "a", text)
			return []uint32{stream}
		},
	} {
		left := lose()
		if n := m.Load(); n != 0 {
			t.Errorf("%s: %d bytes are held", name, n)
		}
		for _, r := range left {
			g.state.Drop(r)
		}
		if n := m.Load(); n != 0 {
			t.Errorf("%s: %d bytes are held in the end", name, n)
		}
	}
}

// TestOutgoingPanic: a panic in the background of a call ends that call only.
func TestOutgoingPanic(t *testing.T) {
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	s := NewSession(wasi.Options{
		HTTP:  roundTrip(func(*http.Request) (*http.Response, error) { panic("the transport is broken") }),
		Guard: func(where string, f func() error) error { return guard.Call(logger, where, f) },
	})
	t.Cleanup(s.Close)
	g := &guest{t, t.Context(), s}
	if _, _, code := g.fetch("http://host/"); code != "internal-error" {
		t.Errorf("fetch() = %s, want internal-error", code)
	}
	if !strings.Contains(log.String(), "the transport is broken") {
		t.Errorf("the log does not have the panic: %s", log.String())
	}
}

// TestOutgoingTrailersFinishedEarly: a guest can finish a body, with trailers, before it sends the request. The end of
// the body races with the start of the request.
func TestOutgoingTrailersFinishedEarly(t *testing.T) {
	g := caller(t, roundTrip(func(r *http.Request) (*http.Response, error) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return nil, err
		}
		return nil, errors.New("trailer " + r.Trailer.Get("X-A"))
	}))
	for range 5000 {
		q := g.request(post, "http://host/", "trailer", "x-a")
		body := g.ok(g.call(types, "[method]outgoing-request.body", u32(q))).U32()
		if !g.finish(body, "x-a", "42") {
			t.Fatal("outgoing-body.finish failed")
		}
		future, code := g.send(q)
		if code != "" {
			t.Fatal(code)
		}
		g.call(polls, "[method]pollable.block", u32(g.call(types, "[method]future-incoming-response.subscribe", u32(future)).U32()))
		r := g.call(types, "[method]future-incoming-response.get", u32(future))
		if !r.Option() || !isOK(r) || isOK(r) {
			t.Fatal("the future gave no error")
		}
		if code := readCode(r); code.Message != "trailer 42" {
			t.Fatalf("the transport ended with %v, want trailer 42", code)
		}
		g.state.Drop(future)
	}
	for _, text := range []string{"", "hello"} { // trailers that the header does not announce
		q := g.request(post, "http://host/")
		body, stream := g.outBody(q)
		g.call(streams, "[method]output-stream.write", u32(stream), str(text))
		g.state.Drop(stream)
		g.finish(body, "x-a", "42")
		future, code := g.send(q)
		if code == "" {
			_, code = g.answer(future)
		}
		if code != "internal-error" {
			t.Errorf("a body %q with a trailer that was not announced: %s, want internal-error", text, code)
		}
	}
}
