package attack

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// caller is a running examples/wasm/fetch-c.
type caller struct {
	*harness.Container
	url string
}

// oneShot keeps no connections, because idle ones would count as leaks of the worker.
var oneShot = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// fetch lets the component call out, and returns the status and the text of its answer.
func (c *caller) fetch(ctx context.Context, path, url string, headers ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+path, nil)
	if err != nil {
		return "", err
	}
	r.Header.Set("X-Url", url)
	for _, h := range headers {
		r.Header.Set(h, "1")
	}
	resp, err := oneShot.Do(r)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return fmt.Sprint(resp.StatusCode, " ", string(text)), err
}

// accomplice starts a server on the node that helps the attacker: it redirects, never answers, or never ends.
func accomplice(t *testing.T) (port string) {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/redirect":
			http.Redirect(w, r, r.URL.RawQuery, http.StatusFound)
		case "/silent":
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		case "/endless":
			for block := make([]byte, 64<<10); r.Context().Err() == nil; {
				_, _ = w.Write(block)
			}
		}
	})}
	server.SetKeepAlivesEnabled(false)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port
}

// TestComponentThatCallsOut: what a component can do by its requests is bounded or refused, and the neighbours are served.
func TestComponentThatCallsOut(t *testing.T) {
	g := open(t)
	port := accomplice(t)
	var c *caller
	var helper string
	g.Run("start", func(*testing.T) {
		pod := g.d.RunWasm(g.T,
			&harness.PodSpec{Name: "attacker-out", Image: harness.FetchC, Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
				c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: podMemory, CpuQuota: 50_000, CpuPeriod: 100_000}
			}}})
		ip := pod.Pod.IP()
		c = &caller{pod, "http://" + net.JoinHostPort(ip, "80")}
		helper = "http://" + net.JoinHostPort(harness.NodeAddress(t, ip), port)
	})
	serving := func(t *testing.T) {
		t.Helper()
		harness.Eventually(t, waitLimit, func() error {
			got, err := c.fetch(t.Context(), "/fetch", helper+"/")
			if err == nil && !strings.HasPrefix(got, "200 ") {
				err = fmt.Errorf("the component answers %q", got)
			}
			return err
		})
	}
	g.attack("redirects to the metadata service and to loopback", func(t *testing.T) {
		for _, to := range []string{"http://169.254.169.254/latest/", "http://127.0.0.1:" + port + "/", "http://[::1]:" + port + "/",
			"http://localhost/", "http://0.0.0.0:" + port + "/"} {
			if got, err := c.fetch(t.Context(), "/fetch", helper+"/redirect?"+to, "X-Follow"); got != "502 destination-IP-prohibited" {
				t.Errorf("%s: got %q, error %v", to, got, err)
			}
		}
		serving(t)
	})
	g.attack("connections without end", func(t *testing.T) {
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				if got, err := c.fetch(t.Context(), "/hoard", helper+"/silent"); !strings.HasSuffix(got, "connection-limit-reached") &&
					!strings.HasPrefix(got, "50") {
					t.Errorf("got %q, error %v; want a limit", got, err)
				}
			})
		}
		all.Wait()
		serving(t)
	})
	g.attack("names in a loop", func(t *testing.T) {
		var all sync.WaitGroup
		for i := range 32 {
			all.Go(func() {
				for n := range 10 {
					if got, err := c.fetch(t.Context(), "/fetch", fmt.Sprintf("http://n%d-%d.invalid/", i, n)); !strings.HasPrefix(got, "502 DNS-") &&
						!strings.HasPrefix(got, "503") {
						t.Errorf("got %q, error %v; want an error of the name", got, err)
					}
				}
			})
		}
		all.Wait()
		serving(t)
	})
	// The clients do not read what the component passes on, so the whole chain stands still.
	g.attack("bodies without end", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), caseTime)
		defer cancel()
		for range 20 {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+"/fetch", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("X-Url", helper+"/endless")
			resp, err := oneShot.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
		}
		<-ctx.Done()
		serving(t)
	})
}
