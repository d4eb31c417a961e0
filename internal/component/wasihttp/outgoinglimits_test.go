package wasihttp

import (
	"errors"
	"io"
	"net/http"
	"testing"
	"time"
)

// TestOutgoingDrops: what the guest drops ends the exchange, and frees what the host held for it.
func TestOutgoingDrops(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		ended := make(chan struct{}, 10)
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) {
			defer func() { ended <- struct{}{} }()
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			_, _ = io.Copy(io.Discard, r.Body)
			if r.Method == http.MethodGet {
				<-r.Context().Done()
			}
		})
		g := caller(t, transportTo(t, server))
		wait := func(what string) {
			t.Helper()
			select {
			case <-ended:
			case <-time.After(10 * time.Second):
				t.Fatalf("%s: the exchange goes on", what)
			}
		}
		future, _ := g.send(g.request(get, server.URL+"/"))
		response, code := g.answer(future)
		if code != "" {
			t.Fatal(code)
		}
		g.state.Drop(future)
		body, _ := g.incoming(response)
		g.state.Drop(response)
		select {
		case <-ended:
			t.Fatal("the exchange ended although the guest has the body")
		case <-time.After(50 * time.Millisecond):
		}
		g.state.Drop(body)
		wait("the last resource of the response")
		future, _ = g.send(g.request(get, server.URL+"/"))
		if _, code = g.answer(future); code != "" {
			t.Fatal(code)
		}
		g.Close()
		wait("the instance")

		g = caller(t, transportTo(t, server))
		q := g.request(post, server.URL+"/")
		unfinished, stream := g.outBody(q)
		if _, code := g.send(q); code != "" {
			t.Fatal(code)
		}
		g.write(stream, "x")
		g.state.Drop(stream)
		g.state.Drop(unfinished)
		wait("the unfinished body")
	})
}

// TestOutgoingCallsAreBounded: calls that are never answered count against what an instance may hold.
func TestOutgoingCallsAreBounded(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	g := caller(t, roundTrip(func(r *http.Request) (*http.Response, error) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return nil, errors.New("released")
	}))
	var futures []uint32
	for n := 0; ; n++ {
		future, code := g.send(g.request(get, "http://host/"))
		if code == "connection-limit-reached" {
			break
		}
		if code != "" || n > 1000 {
			t.Fatalf("call %d: %q", n, code)
		}
		futures = append(futures, future)
	}
	g.state.Drop(futures[0])
	if _, code := g.send(g.request(get, "http://host/")); code != "" {
		t.Errorf("after one call was dropped: %s", code)
	}
}

// TestOutgoingReadsAhead: the host reads what comes with the header of a response before the guest asks for it, so that the guest
// does not wait twice.
func TestOutgoingReadsAhead(t *testing.T) {
	asked := make(chan struct{})
	g := caller(t, roundTrip(func(*http.Request) (*http.Response, error) {
		body := readFunc(func(p []byte) (int, error) {
			close(asked)
			return copy(p, "hello"), io.EOF
		})
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(body)}, nil
	}))
	future, code := g.send(g.request(get, "http://host/"))
	if code != "" {
		t.Fatal(code)
	}
	response, code := g.answer(future)
	if code != "" {
		t.Fatal(code)
	}
	select {
	case <-asked:
	case <-time.After(10 * time.Second):
		t.Fatal("nobody reads the body")
	}
	_, in := g.incoming(response)
	if got := g.readAll(in); got != "hello" {
		t.Errorf("the guest has read %q", got)
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
