package wasihttp

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// TestOutgoingBodies: a request and its response stream at the same time, and both have trailers.
func TestOutgoingBodies(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).EnableFullDuplex()
			w.Header().Set("Trailer", "X-Sum")
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			buf, sum := make([]byte, 100), 0
			for {
				n, err := r.Body.Read(buf)
				sum += n
				w.Write(bytes.ToUpper(buf[:n]))
				http.NewResponseController(w).Flush()
				if err != nil {
					break
				}
			}
			w.Header().Set("X-Sum", fmt.Sprint(sum, " ", r.Trailer.Get("X-Last")))
		})
		g := caller(t, transportTo(t, server))
		q := g.request(post, server.URL+"/", "trailer", "x-last")
		body, stream := g.outBody(q)
		future, code := g.send(q)
		if code != "" {
			t.Fatal(code)
		}
		response, code := g.answer(future) // before the request's body
		if code != "" {
			t.Fatal(code)
		}
		incoming, in := g.incoming(response)
		for _, word := range []string{"one", "two"} {
			if !g.write(stream, word) {
				t.Fatal("the stream is closed")
			}
			if got, _ := g.read(in); got != strings.ToUpper(word) {
				t.Errorf("read() = %q after writing %q", got, word)
			}
		}
		g.state.Drop(stream)
		if !g.finish(body, "x-last", "42") {
			t.Error("outgoing-body.finish failed")
		}
		if rest := g.readAll(in); rest != "" {
			t.Errorf("%q came after the end", rest)
		}
		g.state.Drop(in)
		trailers := g.call(types, "[static]incoming-body.finish", u32(incoming)).U32()
		r := g.call(types, "[method]future-trailers.get", u32(trailers))
		if !r.Option() || !isOK(r) || !isOK(r) || !r.Option() {
			t.Fatal("no trailers")
		}
		values := g.call(types, "[method]fields.get", u32(r.U32()), str("x-sum"))
		if values.Len() != 1 || values.String() != "6 42" {
			t.Error("the trailer x-sum is wrong")
		}
	})
}

// TestOutgoingBodyWithoutFlush: what a guest writes is sent, whether or when it flushes.
func TestOutgoingBodyWithoutFlush(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) {
			control := http.NewResponseController(w)
			_ = control.EnableFullDuplex()
			for buf := make([]byte, 100); ; {
				n, err := r.Body.Read(buf)
				if n > 0 {
					w.Write(bytes.ToUpper(buf[:n]))
					_ = control.Flush()
				}
				if err != nil {
					return
				}
			}
		})
		g := caller(t, transportTo(t, server))
		q := g.request(post, server.URL+"/")
		body, stream := g.outBody(q)
		write := func(s string) { g.ok(g.call(streams, "[method]output-stream.write", u32(stream), str(s))) }
		g.write(stream, "flushed early")
		future, code := g.send(q)
		if code != "" {
			t.Fatal(code)
		}
		response, code := g.answer(future)
		if code != "" {
			t.Fatal(code)
		}
		_, in := g.incoming(response)
		for _, s := range []struct {
			want string
			do   func()
		}{
			{"FLUSHED EARLY", func() {}},
			{"NEVER FLUSHED", func() { write("never flushed") }},
			{"FLUSHED", func() { write("flushed"); g.ok(g.call(streams, "[method]output-stream.blocking-flush", u32(stream))) }},
		} {
			s.do()
			if got, _ := g.read(in); got != s.want {
				t.Errorf("the server sent %q back, want %q", got, s.want)
			}
		}
		g.state.Drop(stream)
		g.finish(body)
	})
}

// TestOutgoingBodyFinishedEarly: a body that is finished before the request is sent has a content-length.
func TestOutgoingBodyFinishedEarly(t *testing.T) {
	server := target(t, false, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%d %s %v", r.ContentLength, body, err)
	})
	g := caller(t, transportTo(t, server))
	for _, text := range []string{"hello", ""} {
		q := g.request(post, server.URL+"/")
		body, stream := g.outBody(q)
		if text != "" && !isOK(g.call(streams, "[method]output-stream.write", u32(stream), str(text))) {
			t.Fatal("write failed")
		}
		g.state.Drop(stream)
		if !g.finish(body) {
			t.Fatal("outgoing-body.finish failed")
		}
		future, _ := g.send(q)
		response, code := g.answer(future)
		if code != "" {
			t.Fatal(code)
		}
		_, in := g.incoming(response)
		if got, want := g.readAll(in), fmt.Sprintf("%d %s <nil>", len(text), text); got != want {
			t.Errorf("the server got %q, want %q", got, want)
		}
	}
}

// TestOutgoingEndlessBody: the request's body waits for the server, and the response's body for the guest.
func TestOutgoingEndlessBody(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		var sent atomic.Int64
		release := make(chan struct{})
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				<-release // reads nothing
				return
			}
			block := make([]byte, 64<<10)
			for r.Context().Err() == nil {
				n, err := w.Write(block)
				if sent.Add(int64(n)); err != nil {
					return
				}
			}
		})
		defer close(release)
		transport := transportTo(t, server)
		transport.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 512 << 10, MaxReceiveBufferPerConnection: 1 << 20}
		g := caller(t, transport)
		q := g.request(post, server.URL+"/")
		_, stream := g.outBody(q)
		if _, code := g.send(q); code != "" {
			t.Fatal(code)
		}
		accepted := 0
		for start := time.Now(); time.Since(start) < 300*time.Millisecond; {
			n := g.ok(g.call(streams, "[method]output-stream.check-write", u32(stream))).U64()
			if n > 0 {
				g.ok(g.call(streams, "[method]output-stream.write", u32(stream), wit.AppendBytes(nil, make([]byte, n))))
				accepted += int(n)
			}
		}
		if accepted > 32<<20 {
			t.Errorf("the host took %d bytes that the server does not read", accepted)
		}
		future, _ := g.send(g.request(get, server.URL+"/"))
		response, code := g.answer(future)
		if code != "" {
			t.Fatal(code)
		}
		_, in := g.incoming(response)
		g.read(in)
		before := int64(-1)
		for now := sent.Load(); now != before; now = sent.Load() {
			before = now
			time.Sleep(100 * time.Millisecond) // pacing: gives the server time to send more
		}
		if before > 32<<20 {
			t.Errorf("the server could send %d bytes that the guest does not read", before)
		}
		ended := make(chan struct{})
		go func() { g.Close(); close(ended) }()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Fatal("Close waits for the bodies")
		}
	})
}

// TestOutgoingBodyLength: a body must have the length that its header says.
func TestOutgoingBodyLength(t *testing.T) {
	server := target(t, false, func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	for _, text := range []string{"four", "sixsix"} {
		g := caller(t, transportTo(t, server))
		q := g.request(post, server.URL+"/", "content-length", "5")
		body, stream := g.outBody(q)
		future, _ := g.send(q)
		wrote := g.write(stream, text)
		g.state.Drop(stream)
		if finished := g.finish(body); wrote && finished {
			t.Errorf("a body of %d bytes with a content-length of 5 was accepted", len(text))
		}
		if _, code := g.answer(future); code == "" {
			t.Errorf("the request with a body of %d bytes and a content-length of 5 has a response", len(text))
		}
	}
}

// TestOutgoingTimeoutWithUnfinishedBody: the timeout between bytes applies while the guest has not finished its own body.
func TestOutgoingTimeoutWithUnfinishedBody(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) {
			control := http.NewResponseController(w)
			_ = control.EnableFullDuplex()
			_, _ = io.WriteString(w, "x")
			_ = control.Flush()
			_, _ = io.Copy(io.Discard, r.Body)
		})
		g := caller(t, transportTo(t, server))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		g.ctx = ctx
		q := g.request(post, server.URL+"/")
		_, out := g.outBody(q)
		g.write(out, "x")
		o := g.call(types, "[constructor]request-options").U32()
		g.ok(g.call(types, "[method]request-options.set-between-bytes-timeout", u32(o), some(u64(uint64(50*time.Millisecond)))))
		future, _ := g.send(q, o)
		response, code := g.answer(future)
		if code != "" {
			t.Fatal(code)
		}
		_, in := g.incoming(response)
		if got := g.readAll(in); got != "x" || ctx.Err() != nil {
			t.Errorf("response %q, error %v; want x and a timeout", got, ctx.Err())
		}
	})
}
