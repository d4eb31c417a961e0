package wasihttp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

const outgoing = "wasi:http/outgoing-handler"

// caller is a guest whose requests a transport sends.
func caller(t testing.TB, transport http.RoundTripper) *guest {
	s := NewSession(wasi.Options{HTTP: transport})
	t.Cleanup(s.Close)
	return &guest{t, t.Context(), s}
}

// transportTo returns a transport that trusts a server.
func transportTo(t testing.TB, server *httptest.Server) *http.Transport {
	transport := server.Client().Transport.(*http.Transport).Clone()
	transport.DisableCompression = true
	transport.ForceAttemptHTTP2 = server.EnableHTTP2
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

// target starts a server over HTTP/1.1 or HTTP/2.
func target(t testing.TB, h2 bool, handler http.HandlerFunc) *httptest.Server {
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = nil
	if server.EnableHTTP2 = h2; h2 {
		server.StartTLS()
	} else {
		server.Start()
	}
	t.Cleanup(server.Close)
	return server
}

// request makes an outgoing-request for a URL.
func (g *guest) request(method int, url string, headers ...string) uint32 {
	q := g.call(types, "[constructor]outgoing-request", u32(g.fields(headers...))).U32()
	g.ok(g.call(types, "[method]outgoing-request.set-method", u32(q), wit.AppendCase(nil, method)))
	scheme, rest, _ := strings.Cut(url, "://")
	host, path, _ := strings.Cut(rest, "/")
	g.ok(g.call(types, "[method]outgoing-request.set-scheme", u32(q), some(u32(map[string]uint32{"http": 0, "https": 1}[scheme]))))
	g.ok(g.call(types, "[method]outgoing-request.set-authority", u32(q), some(str(host))))
	g.ok(g.call(types, "[method]outgoing-request.set-path-with-query", u32(q), some(str("/"+path))))
	return q
}

const (
	get  = 0
	post = 2
)

// outBody asks for the body of a request, and for its stream.
func (g *guest) outBody(q uint32) (body, stream uint32) {
	body = g.ok(g.call(types, "[method]outgoing-request.body", u32(q))).U32()
	return body, g.stream(body)
}

// send sends a request. It returns the future, or the error-code that handle returned.
func (g *guest) send(q uint32, options ...uint32) (future uint32, code string) {
	o := none()
	if len(options) > 0 {
		o = some(u32(options[0]))
	}
	r := g.call(outgoing, "handle", u32(q), o)
	if !isOK(r) {
		return 0, readCode(r).Code
	}
	return r.U32(), ""
}

// answer waits for the response, or returns the error-code.
func (g *guest) answer(future uint32) (response uint32, code string) {
	p := g.call(types, "[method]future-incoming-response.subscribe", u32(future)).U32()
	g.call(polls, "[method]pollable.block", u32(p))
	g.state.Drop(p)
	r := g.call(types, "[method]future-incoming-response.get", u32(future))
	if !r.Option() || !isOK(r) {
		g.t.Fatal("the future gave no answer")
	}
	if !isOK(r) {
		return 0, readCode(r).Code
	}
	return r.U32(), ""
}

// fetch sends a request without a body and reads the whole response.
func (g *guest) fetch(url string, headers ...string) (status uint16, body, code string) {
	future, code := g.send(g.request(get, url, headers...))
	if code != "" {
		return 0, "", code
	}
	defer g.state.Drop(future)
	response, code := g.answer(future)
	if code != "" {
		return 0, "", code
	}
	defer g.state.Drop(response)
	status = g.call(types, "[method]incoming-response.status", u32(response)).U16()
	incoming, stream := g.incoming(response)
	defer g.state.Drop(incoming)
	defer g.state.Drop(stream)
	return status, g.readAll(stream), ""
}

// incoming returns the body of a response and its stream.
func (g *guest) incoming(response uint32) (body, stream uint32) {
	body = g.ok(g.call(types, "[method]incoming-response.consume", u32(response))).U32()
	return body, g.ok(g.call(types, "[method]incoming-body.stream", u32(body))).U32()
}

func (g *guest) readAll(stream uint32) string {
	var all strings.Builder
	for {
		piece, more := g.read(stream)
		if !more {
			return all.String()
		}
		all.WriteString(piece)
	}
}

// versions runs a test over HTTP/1.1 and HTTP/2.
func versions(t *testing.T, test func(t *testing.T, h2 bool)) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("h2=%t", h2), func(t *testing.T) { test(t, h2) })
	}
}

func TestOutgoingRequest(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) {
			if r.ProtoMajor == 2 != h2 || r.UserAgent() != "" || r.Header.Get("X-One") != "1" || r.Host != r.Header.Get("X-Host") ||
				r.Header.Get("Te") != "trailers" {
				t.Errorf("the server got %s with %v", r.Proto, r.Header)
			}
			w.Header().Set("X-Answer", "yes")
			w.WriteHeader(http.StatusTeapot)
			fmt.Fprintf(w, "%s %s", r.Method, r.RequestURI)
		})
		g := caller(t, transportTo(t, server))
		for range 3 {
			status, body, code := g.fetch(server.URL+"/a%20path?q=1", "x-one", "1", "te", "trailers", "x-host", server.Listener.Addr().String())
			if status != http.StatusTeapot || body != "GET /a%20path?q=1" || code != "" {
				t.Errorf("fetch() = %d, %q, %s", status, body, code)
			}
		}
	})
}

// TestOutgoingTrailersMustBeAnnounced: net/http would drop other trailers.
func TestOutgoingTrailersMustBeAnnounced(t *testing.T) {
	server := target(t, false, func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	g := caller(t, transportTo(t, server))
	q := g.request(post, server.URL+"/")
	body, stream := g.outBody(q)
	future, _ := g.send(q)
	g.write(stream, "x")
	g.state.Drop(stream)
	if g.finish(body, "x-last", "42") {
		t.Error("finish accepted a trailer that was not announced")
	}
	if _, code := g.answer(future); code != "internal-error" {
		t.Errorf("answer() = %s, want internal-error", code)
	}
}

// failing is a transport that fails.
type failing struct{ error }

func (f failing) RoundTrip(*http.Request) (*http.Response, error) { return nil, f.error }

func TestOutgoingErrorCodes(t *testing.T) {
	hung := make(chan struct{})
	server := target(t, false, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/cut":
			w.Header().Set("Content-Length", "10")
			w.Write([]byte("half"))
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		case "/close":
			panic(http.ErrAbortHandler)
		case "/hang":
			<-hung
		case "/big":
			w.Header().Set("X-Big", strings.Repeat("x", 1<<16))
		}
	})
	defer close(hung)
	secure := target(t, true, func(http.ResponseWriter, *http.Request) {})
	raw := rawServer(t, "nonsense\r\n\r\n")
	picky := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	picky.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert}
	picky.StartTLS()
	t.Cleanup(picky.Close)

	transport := transportTo(t, server)
	transport.MaxResponseHeaderBytes = 4 << 10
	g := caller(t, transport)
	for _, c := range []struct{ url, code string }{
		{server.URL + "/close", "connection-terminated"},
		{server.URL + "/big", "HTTP-response-header-section-size"},
		{secure.URL + "/", "TLS-certificate-error"},
		{raw, "HTTP-protocol-error"},
		{strings.Replace(server.URL, "http:", "https:", 1) + "/", "TLS-protocol-error"},
	} {
		if _, _, code := g.fetch(c.url); code != c.code {
			t.Errorf("fetch(%s) = %s, want %s", c.url, code, c.code)
		}
	}
	if _, _, code := caller(t, transportTo(t, picky)).fetch(picky.URL + "/"); code != "TLS-alert-received" {
		t.Errorf("without the client certificate: %s, want TLS-alert-received", code)
	}

	// The body is cut off.
	future, _ := g.send(g.request(get, server.URL+"/cut"))
	response, _ := g.answer(future)
	_, in := g.incoming(response)
	for {
		r := g.call(streams, "[method]input-stream.blocking-read", u32(in), u64(100))
		if isOK(r) {
			continue
		}
		if r.Case(2) != 0 {
			t.Fatal("the body ended normally")
		}
		code := g.call(types, "http-error-code", r.Rest())
		if !code.Option() || readCode(code).Code != "HTTP-response-incomplete" {
			t.Error("the stream's error is not HTTP-response-incomplete")
		}
		break
	}

	// Timeouts.
	slow := func(name string) uint32 {
		o := g.call(types, "[constructor]request-options").U32()
		g.ok(g.call(types, "[method]request-options.set-"+name, u32(o), some(u64(uint64(50*time.Millisecond)))))
		return o
	}
	future, _ = g.send(g.request(get, server.URL+"/hang"), slow("first-byte-timeout"))
	if _, code := g.answer(future); code != "connection-read-timeout" {
		t.Errorf("first-byte-timeout: %s, want connection-read-timeout", code)
	}
	deaf := caller(t, &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}})
	o := deaf.call(types, "[constructor]request-options").U32()
	deaf.ok(deaf.call(types, "[method]request-options.set-connect-timeout", u32(o), some(u64(uint64(50*time.Millisecond)))))
	future, _ = deaf.send(deaf.request(get, server.URL+"/"), o)
	if _, code := deaf.answer(future); code != "connection-timeout" {
		t.Errorf("connect-timeout: %s, want connection-timeout", code)
	}

	// Codes from the transport pass through, with their payloads.
	for _, e := range []*CodeError{
		{Code: "DNS-error", Message: "NXDOMAIN"}, {Code: "destination-IP-prohibited"}, {Code: "TLS-alert-received", Message: "m", Alert: 40},
		{Code: "HTTP-response-header-size"}, {Code: "HTTP-request-header-size"}, {Code: "HTTP-response-body-size"}, {Code: "internal-error"},
	} {
		if _, _, code := caller(t, failing{e}).fetch("http://h/"); code != e.Code {
			t.Errorf("fetch() = %s, want %s", code, e.Code)
		}
	}
	var unknown error = x509.UnknownAuthorityError{}
	if code := CodeOf(fmt.Errorf("x: %w", unknown)).Code; code != "TLS-certificate-error" {
		t.Error(code)
	}
	if code := CodeOf(errors.New("strange")); code.Code != "internal-error" || code.Message != "strange" {
		t.Error(code)
	}
}

func TestOutgoingInvalidRequests(t *testing.T) {
	g := caller(t, failing{errors.New("was sent")})
	for _, c := range []struct {
		change []byte
		name   string
		code   string
	}{
		{some(str("user@host")), "authority", "HTTP-request-URI-invalid"},
		{some(str("")), "authority", "HTTP-request-URI-invalid"},
		{none(), "authority", "HTTP-request-URI-invalid"},
		{some(str("host:port")), "authority", "HTTP-request-URI-invalid"},
		{some(str("a b")), "path-with-query", "HTTP-request-URI-invalid"},
		{some(str("http://other/")), "path-with-query", "HTTP-request-URI-invalid"},
		{some(str("/" + strings.Repeat("x", maxPath))), "path-with-query", "HTTP-request-URI-too-long"},
		{wit.AppendString(wit.AppendCase(nil, len(methods)), "BAD METHOD"), "method", "HTTP-request-method-invalid"},
		{wit.AppendCase(nil, 5), "method", "HTTP-request-method-invalid"}, // CONNECT
		{some(wit.AppendString(wit.AppendCase(nil, 2), "ftp")), "scheme", "HTTP-protocol-error"},
	} {
		q := g.request(get, "http://host/")
		g.ok(g.call(types, "[method]outgoing-request.set-"+c.name, u32(q), c.change))
		if _, code := g.send(q); code != c.code {
			t.Errorf("%s %q: %s, want %s", c.name, c.change, code, c.code)
		}
	}
	if _, code := g.send(g.request(post, "http://host/", "content-length", "5")); code != "HTTP-request-body-size" {
		t.Errorf("a length without a body: %s", code)
	}
}

// TestOutgoingHeadersThatAreRefused: what servers could read in different ways is not sent.
func TestOutgoingHeadersThatAreRefused(t *testing.T) {
	g := caller(t, failing{errors.New("was sent")})
	for _, headers := range [][]string{
		{"content-length", "5", "content-length", "6"}, {"content-length", "5, 5"}, {"content-length", "-1"}, {"content-length", "+5"},
		{"content-length", "five"},
		{"content-length", ""}, {"trailer", "x-sum, bad name"}, {"trailer", "bad:name"}, {"trailer", "\u00e4"},
	} {
		q := g.request(post, "http://host/", headers...)
		g.outBody(q)
		if _, code := g.send(q); code != "HTTP-protocol-error" {
			t.Errorf("a request with %q: %q, want HTTP-protocol-error", headers, code)
		}
	}
}

// TestOutgoingOnTheWire: whatever a guest sets is sent in the form that HTTP demands.
func TestOutgoingOnTheWire(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) {
			if got := r.Header["X-Spaces"]; len(got) != 1 || got[0] != "a b" {
				t.Errorf("X-Spaces = %q, want it without spaces around it", got)
			}
			io.WriteString(w, r.RequestURI)
		})
		g := caller(t, transportTo(t, server))
		for sent, want := range map[string]string{
			"/?q=\u00e4": "/?q=%C3%A4", "/\u00e4?": "/%C3%A4?", "/?a b": "/?a%20b", "/?a=1 HTTP/1.1": "/?a=1%20HTTP/1.1", "/?a#b": "/?a%23b",
			"/?100%":  "/?100%25",
			"/?%zz%2": "/?%25zz%252", "/?%c3%A4": "/?%c3%A4", "/?\"<>[]^`{|}\\": "/?%22%3C%3E%5B%5D%5E%60%7B%7C%7D%5C",
			"/?q=-._~!$&'()*+,;=:@/?": "/?q=-._~!$&'()*+,;=:@/?",
		} {
			if status, body, code := g.fetch(server.URL+sent, "x-spaces", " a b\t"); status != http.StatusOK || body != want {
				t.Errorf("fetch of %q = %d, %q, %s; want %q", sent, status, body, code, want)
			}
		}
	})
}

// TestOutgoingSameLengths: a content-length that is declared twice counts once.
func TestOutgoingSameLengths(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		server := target(t, h2, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.ContentLength) })
		g := caller(t, transportTo(t, server))
		q := g.request(post, server.URL+"/", "content-length", "5", "content-length", "5")
		body, stream := g.outBody(q)
		future, code := g.send(q)
		g.write(stream, "hello")
		g.state.Drop(stream)
		if code != "" || !g.finish(body) {
			t.Fatalf("the request was refused: %s", code)
		}
		response, code := g.answer(future)
		if code != "" {
			t.Fatalf("the request failed: %s", code)
		}
		_, stream = g.incoming(response)
		if got := g.readAll(stream); got != "5" {
			t.Errorf("the server got a length of %s, want 5", got)
		}
	})
}
