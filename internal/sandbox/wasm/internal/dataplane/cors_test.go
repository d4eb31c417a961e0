package dataplane

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
)

// allow serves the test's component to pages from the given origins.
func allow(c CORS, next func(GRPCOptions) http.Handler) func(*GRPCOptions, *Config, *Material) {
	return func(o *GRPCOptions, config *Config, _ *Material) { config.Handler = WithCORS(c, next(*o)) }
}

func newGRPC(t *testing.T) func(GRPCOptions) http.Handler {
	return func(o GRPCOptions) http.Handler {
		h, err := NewGRPC(o)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
}

// send sends a request with header fields, each "name: value".
func (c httpClient) send(t *testing.T, method, path, body string, fields ...string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, c.base+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range fields {
		if name, value, ok := strings.Cut(field, ": "); ok {
			request.Header.Add(name, value)
		}
	}
	response, err := c.Do(request)
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

// http1 returns an HTTP/1.1 client.
func (s *testServer) http1(t *testing.T) httpClient {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return httpClient{&http.Client{Transport: transport}, "http://" + s.CleartextAddress}
}

func list(h http.Header, name string) []string {
	return strings.Split(strings.ToLower(strings.Join(h.Values(name), ", ")), ", ")
}

func TestCORS(t *testing.T) {
	s := startServer(t, &echo{}, allow(CORS{Origins: []string{"https://app.example", "https://*.example.com"}, Credentials: true}, newGRPC(t)))
	clients := s.httpClients(t)
	clients["http1"] = s.http1(t)
	for way, c := range clients {
		for origin, allowed := range map[string]bool{
			"https://app.example": true, "https://a.example.com": true, "https://a.b.example.com": true,
			"https://example.com": false, "http://app.example": false, "https://app.example:8443": false,
			"https://app.example.evil": false, "https://evil-app.example": false, "https://evilexample.com": false, "null": false,
		} {
			want := ""
			if allowed {
				want = origin
			}
			response, _ := c.send(t, http.MethodOptions, testPath+"UnaryCall", "", "Origin: "+origin, "Access-Control-Request-Method: POST",
				"Access-Control-Request-Headers: connect-protocol-version,content-type,x-mine", "Access-Control-Request-Private-Network: true")
			h := response.Header
			if response.StatusCode != http.StatusNoContent || h.Get(allowOrigin) != want || !slices.Contains(list(h, "Vary"), "origin") {
				t.Errorf("preflight for %s over %s = %s %v, want 204 for %q", origin, way, response.Status, h, want)
			}
			if allowed && (h.Get("Access-Control-Allow-Methods") != "POST" || h.Get("Access-Control-Max-Age") != "7200" ||
				h.Get(allowCredentials) != "true" ||
				h.Get("Access-Control-Allow-Headers") != "connect-protocol-version,content-type,x-mine" ||
				h.Get("Access-Control-Allow-Private-Network") != "true") {
				t.Errorf("preflight for %s over %s = %v", origin, way, h)
			}
			response, body := c.send(t, http.MethodPost, testPath+"UnaryCall", `{"payload":{"body":"aGVsbG8="}}`,
				"Origin: "+origin, "Content-Type: application/json", "Echo-Mine: 1", "Echo-Bin: AQI")
			h = response.Header
			if response.StatusCode != http.StatusOK || !strings.Contains(body, "aGVsbG8=") || h.Get(allowOrigin) != want ||
				!slices.Contains(list(h, "Vary"), "origin") {
				t.Errorf("POST from %s over %s = %s %v %s, want 200 for %q", origin, way, response.Status, h, body, want)
			}
			exposed := list(h, "Access-Control-Expose-Headers")
			for _, name := range []string{"grpc-status", "grpc-message", "grpc-status-details-bin", "echo-mine", "echo-bin",
				"trailer-trailing-echo-mine"} {
				if slices.Contains(exposed, name) != allowed {
					t.Errorf("POST from %s over %s exposes %v, want %s: %v", origin, way, exposed, name, allowed)
				}
			}
		}
		// Without an Origin, a response only says that others can differ.
		response, _ := c.send(t, http.MethodPost, testPath+"UnaryCall", `{}`, "Content-Type: application/json")
		if response.Header.Get(allowOrigin) != "" || !slices.Contains(list(response.Header, "Vary"), "origin") {
			t.Errorf("POST without origin over %s = %v", way, response.Header)
		}
	}
	var header metadata.MD
	if _, err := s.dial(t, true).UnaryCall(t.Context(), &pb.SimpleRequest{}, grpc.Header(&header)); err != nil || len(header["vary"]) > 0 {
		t.Errorf("native gRPC = %v, %v; want no field of CORS", header, err)
	}
}

// TestCORSErrors checks that pages can also read errors: of gRPC-Web with the status in the header, and of HTTP.
func TestCORSErrors(t *testing.T) {
	s := startServer(t, invokerFunc(func(context.Context, *Method, Call) error { return Errorf(codes.NotFound, "none") }),
		allow(CORS{Origins: []string{"*"}}, newGRPC(t)))
	c := s.http1(t)
	for path, contentType := range map[string]string{
		testPath + "UnaryCall": "application/json", testPath + "None": "application/json", testPath + "Nothing": "application/grpc-web",
		testPath + "EmptyCall": "image/png",
	} {
		response, _ := c.send(t, http.MethodPost, path, "{}", "Origin: https://any.example", "Content-Type: "+contentType)
		if response.Header.Get(allowOrigin) != "*" || !slices.Contains(list(response.Header, "Access-Control-Expose-Headers"), "grpc-status") {
			t.Errorf("POST of %s to %s = %s %v, want the CORS fields", contentType, path, response.Status, response.Header)
		}
		if response.Header.Get(allowCredentials) != "" {
			t.Errorf("POST to %s = %v, want no credentials", path, response.Header)
		}
	}
}

// TestCORSOff checks that the default changes nothing: preflight requests reach the handler, and there are no fields.
func TestCORSOff(t *testing.T) {
	c := startServer(t, &echo{}).http1(t)
	response, _ := c.send(t, http.MethodOptions, testPath+"UnaryCall", "", "Origin: https://a.example", "Access-Control-Request-Method: POST")
	if response.StatusCode != http.StatusMethodNotAllowed || response.Header.Get("Vary") != "" {
		t.Errorf("preflight = %s %v, want 405", response.Status, response.Header)
	}
}

// TestCORSOfComponent checks that a wasi:http component cannot contradict the node's answer.
func TestCORSOfComponent(t *testing.T) {
	component := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Vary"] = []string{"Accept"}
		w.Header().Set(allowOrigin, "*")
		w.Header().Set("Access-Control-Expose-Headers", "X-None")
		w.Header().Set("X-Mine", "1")
		if r.URL.Path != "/empty" {
			_, _ = io.WriteString(w, r.Method)
		}
	})
	s := startServer(t, nil,
		allow(CORS{Origins: []string{"https://app.example"}}, func(o GRPCOptions) http.Handler { return NewHTTP(o.Options, component) }))
	c := s.http1(t)
	for origin, want := range map[string][]string{"https://app.example": {"https://app.example"}, "https://evil.example": nil} {
		for _, path := range []string{"/", "/empty"} {
			response, _ := c.send(t, http.MethodPut, path, "", "Origin: "+origin)
			h := response.Header
			if got := h.Values(allowOrigin); !slices.Equal(got, want) || !slices.Contains(list(h, "Vary"), "accept") ||
				!slices.Contains(list(h, "Vary"), "origin") {
				t.Errorf("PUT %s from %s = %v, want the origin %v", path, origin, h, want)
			}
			if exposed := list(h, "Access-Control-Expose-Headers"); slices.Contains(exposed, "x-mine") != (want != nil) ||
				slices.Contains(exposed, "x-none") {
				t.Errorf("PUT %s from %s exposes %v", path, origin, exposed)
			}
		}
	}
	response, body := c.send(t, http.MethodOptions, "/", "", "Origin: https://app.example") // not a preflight request
	if body != http.MethodOptions || response.Header.Get(allowOrigin) != "https://app.example" {
		t.Errorf("OPTIONS = %q %v, want the component's answer", body, response.Header)
	}
}

// TestCORSVary checks that caches keep the answers for each origin apart, whatever else the component names.
func TestCORSVary(t *testing.T) {
	for vary, want := range map[string][]string{
		"X-Original-Host": {"X-Original-Host", "Origin"}, "accept, origin": {"accept, origin"}, "Accept,ORIGIN ,Range": {"Accept,ORIGIN ,Range"},
	} {
		h := http.Header{"Vary": {vary}}
		expose(h, nil, nil)
		if got := h.Values("Vary"); !slices.Equal(got, want) {
			t.Errorf("Vary of a component's %q = %q, want %q", vary, got, want)
		}
	}
}
