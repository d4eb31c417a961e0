package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// outside starts a server on all addresses of the node, and returns its port.
func outside(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(handler)
	s.Listener.Close()
	s.Listener = l
	s.Start()
	t.Cleanup(s.Close)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// fetcher runs examples/wasm/fetch-c.
type fetcher struct {
	*harness.Container
	t *testing.T
}

func startFetcher(t *testing.T, d *harness.Daemon, pod ...harness.PodOption) fetcher {
	t.Helper()
	return fetcher{d.RunWasm(t, &harness.PodSpec{Image: harness.FetchC, Pod: pod}), t}
}

// do lets the component send a request to a URL.
func (f fetcher) do(ip, url string) *http.Response {
	f.t.Helper()
	r, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, "http://"+net.JoinHostPort(ip, "80")+"/fetch", nil)
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("X-Url", url)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func (f fetcher) fetch(ip, url string) string {
	f.t.Helper()
	resp := f.do(ip, url)
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return fmt.Sprint(resp.StatusCode, " ", string(text))
}

// TestWasmEgress: a component calls out from its pod's address, while the daemon is dead, too. A response that is being
// received is not affected by the daemon's end.
func TestWasmEgress(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	next := make(chan struct{})
	port := outside(t, func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintln(w, "from", host)
		for range 2 {
			if r.URL.Path != "/long" {
				return
			}
			http.NewResponseController(w).Flush()
			<-next
			fmt.Fprintln(w, "more")
		}
	})
	f := startFetcher(t, d)
	ip := f.Pod.IP()
	url := "http://" + net.JoinHostPort(harness.NodeAddress(t, ip), port)
	want := "200 from " + ip + "\n"
	if got := f.fetch(ip, url+"/"); got != want {
		t.Fatalf("answer: got %q, want %q", got, want)
	}
	long := f.do(ip, url+"/long")
	lines := bufio.NewReader(long.Body)
	if line, err := lines.ReadString('\n'); line != "from "+ip+"\n" {
		t.Fatalf("first line: got %q, error %v", line, err)
	}
	d.Kill()
	if got := f.fetch(ip, url+"/"); got != want {
		t.Errorf("answer without a daemon: got %q, want %q", got, want)
	}
	close(next)
	if rest, err := io.ReadAll(lines); string(rest) != "more\nmore\n" || err != nil {
		t.Errorf("rest of the body without a daemon: got %q, error %v", rest, err)
	}
	d.Start()
	if got := f.fetch(ip, url+"/"); got != want {
		t.Errorf("answer after the daemon's restart: got %q, want %q", got, want)
	}
	for _, forbidden := range []string{"http://127.0.0.1:" + port, "http://169.254.169.254", "http://[::1]:" + port,
		"http://localhost:" + port} {
		if got := f.fetch(ip, forbidden+"/"); got != "502 destination-IP-prohibited" {
			t.Errorf("%s: got %q, want destination-IP-prohibited", forbidden, got)
		}
	}
	limited := startFetcher(t, d, annotate("egress", "*.example:443, "+harness.NodeAddress(t, ip)+":1"))
	for _, forbidden := range []string{url, "http://other.test"} {
		if got := limited.fetch(limited.Pod.IP(), forbidden+"/"); !strings.HasPrefix(got, "502 ") || strings.Contains(got, "refused") {
			t.Errorf("%s with an allow-list: got %q, want a refusal", forbidden, got)
		}
	}
}

// TestWasmEgressOnTheHostNetwork: the node's loopback is out of reach unless the pod's annotation names it.
func TestWasmEgressOnTheHostNetwork(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	port := outside(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
	onHost := func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext = &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE}}
	}
	for rules, want := range map[string]string{"*": "502 destination-IP-prohibited", "127.0.0.1:" + port: "200 hello"} {
		f := startFetcher(t, d, onHost, annotate("egress", rules, "cleartext-port", "8089", "port", "8449"))
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:8089/fetch", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-Url", "http://127.0.0.1:"+port+"/")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if got := fmt.Sprint(resp.StatusCode, " ", string(text)); got != want {
			t.Errorf("rules %q: got %q, want %q", rules, got, want)
		}
		f.Pod.Remove()
	}
}
