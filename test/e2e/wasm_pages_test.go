package e2e

import (
	"encoding/base64"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

// page sends requests like a browser that shows a page of the given origin.
type page struct {
	*testing.T
	origin string
}

func (p page) do(method, url, body string, fields ...string) (*http.Response, string) {
	p.Helper()
	request, err := http.NewRequestWithContext(p.Context(), method, url, strings.NewReader(body))
	if err != nil {
		p.Fatal(err)
	}
	request.Header.Set("Origin", p.origin)
	for i := 0; i < len(fields); i += 2 {
		request.Header.Set(fields[i], fields[i+1])
	}
	client := &http.Client{Timeout: waitLimit}
	response, err := client.Do(request)
	if err != nil {
		p.Fatal(err)
	}
	defer response.Body.Close()
	b, err := io.ReadAll(response.Body)
	if err != nil {
		p.Fatal(err)
	}
	return response, string(b)
}

// allowed reports whether a browser would let the page call the URL with JSON: whether both the preflight request and
// the call allow it.
func (p page) allowed(url string) bool {
	p.Helper()
	preflight, _ := p.do(http.MethodOptions, url, "", "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers",
		"content-type")
	call, body := p.do(http.MethodPost, url, `{"name":"Ada"}`, "Content-Type", "application/json")
	if call.StatusCode != http.StatusOK || !strings.Contains(body, "Ada") {
		p.Errorf("call of %s: got %s %q", url, call.Status, body)
	}
	const field = "Access-Control-Allow-Origin"
	yes := preflight.StatusCode == http.StatusNoContent && preflight.Header.Get(field) == p.origin
	if (call.Header.Get(field) == p.origin) != yes {
		p.Errorf("answers to a page of %s: preflight %s %v, call %v", p.origin, preflight.Status, preflight.Header, call.Header)
	}
	return yes
}

// TestWasmPages: web pages can call a pod if the node's configuration or the pod's annotation allows their origin, also
// through the node.
func TestWasmPages(t *testing.T) {
	const nodes, own, other = "https://node.example", "https://app.pod.example", "https://evil.example"
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.Set("wasm.cors_origins", []string{nodes}),
		harness.Set("route.cleartext_address", routeCleartext))
	const method = "/" + greeter + "/SayHello"
	check := func(name, url string, allowed ...string) {
		t.Helper()
		for _, origin := range []string{nodes, own, other} {
			want := strings.Contains(strings.Join(allowed, " "), origin)
			if got := (page{t, origin}).allowed(url); got != want {
				t.Errorf("%s: page of %s allowed: got %v, want %v", name, origin, got, want)
			}
		}
	}
	annotated := d.RunWasm(t,
		&harness.PodSpec{Name: "own", Image: harness.GreeterC, Pod: []harness.PodOption{annotate("cors-origins", "https://*.pod.example")}})
	check("annotation", "http://"+annotated.Pod.IP()+method, own)
	check("annotation, through the node", "http://"+routeCleartext+method, own)
	check("configuration", "http://"+d.RunWasm(t, &harness.PodSpec{Name: "default", Image: harness.GreeterC}).Pod.IP()+method, nodes)
	check("off", "http://"+d.RunWasm(t,
		&harness.PodSpec{Name: "off", Image: harness.GreeterC, Pod: []harness.PodOption{annotate("cors-origins", "off")}}).Pod.IP()+method)

	hello := "http://" + d.RunWasm(t, &harness.PodSpec{Name: "http", Image: harness.HelloHTTP}).Pod.IP() + "/"
	if response, body := (page{t, nodes}).do(http.MethodGet, hello, ""); response.Header.Get("Access-Control-Allow-Origin") != nodes ||
		body == "" {
		t.Errorf("wasi:http component: got %s %v", response.Status, response.Header)
	}
	invalid := harness.PodConfig(t, "invalid", annotate("cors-origins", "app.example"))
	if _, err := d.Runtime().RunPodSandbox(t.Context(), invalid, "wasm"); err == nil ||
		!strings.Contains(err.Error(), "vimana.host/cors-origins") {
		t.Errorf("pod with an invalid origin: got error %v, want one about the annotation", err)
	}
}

// TestWasmWebText: a page calls a component with gRPC-Web's text format, with a request in two padded strings, and with
// a stream in both directions over HTTP/1.1.
func TestWasmWebText(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	base := "http://" + d.RunWasm(t, &harness.PodSpec{Image: harness.GreeterC}).Pod.IP() + "/" + greeter
	p := page{t, "https://any.example"}
	encode := base64.StdEncoding.EncodeToString
	request := "\x00\x00\x00\x00\x05\x0a\x03Ada" // HelloRequest{name: "Ada"}
	response, body := p.do(http.MethodPost, base+"/SayHello", encode([]byte(request[:7]))+encode([]byte(request[7:])), "Content-Type",
		"application/grpc-web-text")
	var answer strings.Builder
	for part := range strings.SplitAfterSeq(strings.ReplaceAll(body, "==", "="), "=") {
		b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(part, "="))
		if err != nil {
			t.Fatalf("%v: %q", err, body)
		}
		answer.Write(b)
	}
	if got := answer.String(); !strings.Contains(got, "Hello, Ada!") || !strings.Contains(got, "grpc-status: 0") ||
		response.Header.Get("Content-Type") != "application/grpc-web-text" {
		t.Errorf("call in the text format: got %v %q", response.Header, got)
	}
	_, body = p.do(http.MethodPost, base+"/Chat", "\x00\x00\x00\x00\x0e{\"name\":\"Ada\"}\x00\x00\x00\x00\x0e{\"name\":\"Bob\"}",
		"Content-Type", "application/connect+json")
	if !strings.Contains(body, "Hello, Ada!") || !strings.Contains(body, "Hello, Bob!") || !strings.HasSuffix(body, "{}") {
		t.Errorf("stream in both directions over HTTP/1.1: got %q", body)
	}
}
