package wasihttp

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// TestGuestsThatFail: the client gets a status, or sees that the response is incomplete, but never one that looks
// complete.
func TestGuestsThatFail(t *testing.T) {
	boom := errors.New("unreachable executed")
	for name, c := range map[string]struct {
		handle func(g *guest, q, out uint32)
		status int // 0: the response is aborted
		err    error
	}{
		"traps":            {func(*guest, uint32, uint32) { panic(trap{boom}) }, 500, boom},
		"uses up its time": {func(*guest, uint32, uint32) { panic(trap{context.DeadlineExceeded}) }, 504, context.DeadlineExceeded},
		"uses up memory":   {func(*guest, uint32, uint32) { panic(trap{errdefs.ErrResourceExhausted}) }, 503, errdefs.ErrResourceExhausted},
		"says nothing":     {func(*guest, uint32, uint32) {}, 500, ErrNoResponse},
		"traps in the body": {func(g *guest, _, out uint32) {
			g.write(g.stream(g.respond(out, 200)), "some")
			panic(trap{boom})
		}, 0, boom},
		"does not finish": {func(g *guest, _, out uint32) { g.write(g.stream(g.respond(out, 200)), "some") }, 0, ErrUnfinished},
		"promises more bytes": {func(g *guest, _, out uint32) {
			body := g.respond(out, 200, "content-length", "10")
			g.write(g.stream(body), "some")
			if g.finish(body) {
				g.t.Error("finish accepted a body that is too short")
			}
		}, 0, ErrUnfinished},
		"declares two lengths": {func(g *guest, _, out uint32) {
			g.write(g.stream(g.respond(out, 200, "content-length", "4", "content-length", "5")), "some")
		}, 500, nil},
		"declares no number": {func(g *guest, _, out uint32) { g.finish(g.respond(out, 200, "content-length", "4, 4")) }, 500, nil},
		"answers with an error": {func(g *guest, _, out uint32) {
			g.call(types, "[static]response-outparam.set", u32(out), u32(1), u32(uint32(caseOf("HTTP-request-denied"))))
		}, 403, nil},
		"answers with an internal error": {func(g *guest, _, out uint32) {
			g.call(types, "[static]response-outparam.set", u32(out), u32(1), u32(uint32(caseOf("internal-error"))), some(str("secret")))
		}, 500, nil},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, h2 bool) {
				server, outcomes := serve(t, h2, c.handle)
				resp, err := server.Client().Do(request(t, "GET", server.URL, nil))
				var body []byte
				if err == nil {
					defer resp.Body.Close()
					body, err = io.ReadAll(resp.Body)
				}
				switch {
				case c.status == 0 && err == nil:
					t.Errorf("the response looks complete: %v %q", resp, body)
				case c.status != 0 && (err != nil || resp.StatusCode != c.status || strings.Contains(string(body), "secret")):
					t.Errorf("got response %v, body %q, error %v; want status %d", resp, body, err, c.status)
				}
				o := <-outcomes
				if _, isCode := errors.AsType[*CodeError](o.err); c.err == nil && !isCode {
					t.Errorf("Serve: error %v, want a CodeError", o.err)
				} else if c.err != nil {
					want(t, o, c.err)
				}
			})
		})
	}
}

func TestTooLongBody(t *testing.T) {
	server, outcomes := serve(t, false, func(g *guest, _, out uint32) {
		body := g.respond(out, 200, "content-length", "3")
		to := g.stream(body)
		if !g.write(to, "abc") {
			g.t.Error("write within the content-length failed")
		}
		r := g.call(streams, "[method]output-stream.blocking-write-and-flush", u32(to), str("d"))
		if isOK(r) || r.U32() != 0 {
			g.t.Error("write beyond the content-length succeeded")
			return
		}
		code := g.call(types, "http-error-code", u32(r.U32()))
		if !code.Option() || code.U32() != uint32(caseOf("HTTP-response-body-size")) {
			g.t.Error("the error-code is not HTTP-response-body-size")
		}
	})
	resp, err := server.Client().Do(request(t, "GET", server.URL, nil))
	want(t, <-outcomes, ErrUnfinished) // a client that closes the response earlier ends the guest's call
	if err == nil {
		resp.Body.Close()
	}
}

// TestHeadAndNoContent: the body is discarded if the response cannot have one.
func TestHeadAndNoContent(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		server, outcomes := serve(t, h2, func(g *guest, q, out uint32) {
			status := uint16(200)
			if m := g.call(types, "[method]incoming-request.method", u32(q)).U32(); m == 0 {
				status = 204
			}
			body := g.respond(out, status)
			g.write(g.stream(body), "a body")
			g.finish(body)
		})
		for _, method := range []string{"HEAD", "GET"} {
			if resp, body := do(t, server, request(t, method, server.URL, nil)); body != "" {
				t.Errorf("%s: status %v, body %q; want no body", method, resp.Status, body)
			}
			want(t, <-outcomes, nil)
		}
	})
}

// TestClientGoesAway: the guest sees its streams end, and the request leaves nothing behind.
func TestClientGoesAway(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		server, outcomes := serve(t, h2, func(g *guest, _, out uint32) {
			to := g.stream(g.respond(out, 200))
			for g.write(to, strings.Repeat("x", 4096)) {
			}
		})
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := server.Client().Do(request(t, "GET", server.URL, nil).WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, 10000)); err != nil {
			t.Fatal(err)
		}
		cancel()
		resp.Body.Close()
		select {
		case o := <-outcomes:
			if o.err != nil && !errors.Is(o.err, context.Canceled) {
				t.Errorf("Serve: error %v, want nil or context.Canceled", o.err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the guest still writes after 10 s")
		}
	})
}

// TestClientDoesNotSend: the request's context ends a guest that waits for a body that never comes.
func TestClientDoesNotSend(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		for _, background := range []bool{false, true} {
			server, outcomes := serve(t, h2, func(g *guest, q, _ uint32) {
				_, in := g.input(q)
				if background {
					p := g.call(streams, "[method]input-stream.subscribe", u32(in)).U32()
					g.call(polls, "poll", u32(1), u32(p))
				}
				g.read(in)
			})
			handler := server.Config.Handler
			server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				ctx, cancel := context.WithTimeout(r.Context(), 50*time.Millisecond)
				defer cancel()
				handler.ServeHTTP(w, r.WithContext(ctx))
			})
			body, _ := io.Pipe()
			go func() {
				resp, err := server.Client().Do(request(t, "POST", server.URL, body))
				if err == nil {
					resp.Body.Close()
				}
			}()
			select {
			case o := <-outcomes:
				if o.err == nil {
					t.Error("Serve returned no error")
				}
			case <-time.After(10 * time.Second):
				t.Fatal("the guest still waits after 10 s")
			}
			body.Close()
		}
	})
}
