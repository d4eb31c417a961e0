package wasihttp

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// TestResourcesOfAnEarlierRequest: a reused instance keeps resources of a request that is over, whose writers the
// server has given to others meanwhile.
func TestResourcesOfAnEarlierRequest(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		s := NewSession(wasi.Options{})
		defer s.Close()
		var incoming, out, body, trailers uint32
		late := map[string]func(g *guest){
			"/respond": func(g *guest) { g.write(g.stream(g.respond(out, 200)), "late") },
			"/inform": func(g *guest) {
				g.call(types, "[method]response-outparam.send-informational", u32(out), u16(103), u32(g.fields("a", "b")))
			},
		}
		harmless := map[string]func(g *guest){
			"/finish": func(g *guest) { g.finish(body, "a", "b") },
			"/read": func(g *guest) {
				if _, more := g.read(g.ok(g.call(types, "[method]incoming-body.stream",
					u32(g.ok(g.call(types, "[method]incoming-request.consume", u32(incoming))).U32()))).U32()); more {
					t.Error("the guest could read the body of an earlier request")
				}
			},
			"/trailers": func(g *guest) { g.call(types, "[method]future-trailers.get", u32(trailers)) },
		}
		outcomes := make(chan error, 10)
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			err := s.Serve(w, r, func(ctx context.Context, params []byte) error {
				return play(&guest{t, ctx, s}, params, func(g *guest, q, o uint32) {
					switch {
					case r.URL.Path == "/keep":
						incoming, out = q, o
					case r.URL.Path == "/keep-body":
						b, _ := g.input(q)
						trailers = g.call(types, "[static]incoming-body.finish", u32(b)).U32()
						body = g.respond(o, 200)
					case late[r.URL.Path] != nil:
						late[r.URL.Path](g)
						t.Errorf("%s used an earlier request without a trap", r.URL.Path)
					default:
						harmless[r.URL.Path](g)
						g.finish(g.respond(o, 204))
					}
				})
			})
			outcomes <- err
			if err != nil {
				Fail(w, err)
			}
		}))
		server.EnableHTTP2 = h2
		if h2 {
			server.StartTLS()
		} else {
			server.Start()
		}
		defer server.Close()
		get := func(path string) error {
			t.Helper()
			resp, err := server.Client().Do(request(t, "POST", server.URL+path, http.NoBody))
			if err == nil {
				defer resp.Body.Close() // after the outcome: a client that closes the response earlier ends the guest's call
			}
			select {
			case err := <-outcomes:
				return err
			case <-time.After(5 * time.Second):
				t.Fatalf("GET %s: the handler panicked", path)
				return nil
			}
		}
		for path := range late {
			if err := get("/keep"); !errors.Is(err, ErrNoResponse) {
				t.Errorf("GET /keep: error %v, want ErrNoResponse", err)
			}
			if err := get(path); err == nil || errors.Is(err, ErrNoResponse) {
				t.Errorf("GET %s: error %v, want another error than ErrNoResponse", path, err)
			}
		}
		for path := range harmless {
			if err := get("/keep"); !errors.Is(err, ErrNoResponse) {
				t.Errorf("GET /keep: error %v, want ErrNoResponse", err)
			}
			if err := get("/keep-body"); !errors.Is(err, ErrUnfinished) {
				t.Errorf("GET /keep-body: error %v, want ErrUnfinished", err)
			}
			if err := get(path); err != nil {
				t.Errorf("GET %s: %v", path, err)
			}
		}
	})
}

// TestMemoryOfTheHostIsBounded: a guest that collects resources of the host gets an error in the end, and everything is
// given back.
func TestMemoryOfTheHostIsBounded(t *testing.T) {
	big := strings.Repeat("x", 1<<19)
	for name, gather := range map[string]func(g *guest) bool{
		"properties": func(g *guest) bool {
			q := g.call(types, "[constructor]outgoing-request", u32(g.fields())).U32()
			return isOK(g.call(types, "[method]outgoing-request.set-authority", u32(q), some(str(big))))
		},
		"fields": func(g *guest) bool {
			f := g.call(types, "[constructor]fields").U32()
			return isOK(g.call(types, "[method]fields.append", u32(f), str("a"), list([]byte(big))))
		},
		"clones": func(g *guest) bool {
			g.call(types, "[method]fields.clone", u32(g.fields("a", big)))
			return true
		},
		"views": func(g *guest) bool {
			r := g.call(types, "[constructor]outgoing-response", u32(g.fields("a", big))).U32()
			g.call(types, "[method]outgoing-response.headers", u32(r))
			return true
		},
		"bodies": func(g *guest) bool {
			r := g.call(types, "[constructor]outgoing-response", u32(g.fields())).U32()
			b := g.ok(g.call(types, "[method]outgoing-response.body", u32(r))).U32()
			return g.write(g.stream(b), big[:64<<10])
		},
	} {
		g := newGuest(t)
		n := 0
		err := play(g, make([]byte, 8), func(g *guest, _, _ uint32) {
			for gather(g) && n < 1000 {
				n++
			}
		})
		if n < 5 || n >= 1000 {
			t.Errorf("%s succeeded %d times (%v), want 5 to 999", name, n, err)
		}
		for _, f := range []string{"a", "b"} { // there must be room again
			g.Close()
			if g.fields(f, big) == ^uint32(0) {
				t.Errorf("%s: no room afterwards", name)
			}
		}
	}
}

func list(b []byte) []byte { return wit.AppendBytes(nil, b) }
