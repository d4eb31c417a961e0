package wasihttp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasi"
)

// hello serves a component of examples/wasm, written in C on the bare ABI, on one of the engine's two paths.
type hello struct {
	t       *testing.T
	options wasi.Options
	code    *engine.Code
	handle  *engine.Func
	path    engine.Path
}

var testEngine = sync.OnceValues(func() (*engine.Engine, error) { return engine.New(engine.Config{Instances: 16}) })

var (
	helloCode = sync.OnceValues(func() (*engine.Code, error) { return compile("hello-http-c") })
	fetchCode = sync.OnceValues(func() (*engine.Code, error) { return compile("fetch-c") })
)

func compile(example string) (*engine.Code, error) {
	wasm, err := os.ReadFile("../../../examples/wasm/" + example + "/" + example + ".wasm")
	if err != nil {
		return nil, err
	}
	e, err := testEngine()
	if err != nil {
		return nil, err
	}
	image, err := e.Compile(context.Background(), wasm, engine.CompileOptions{Provided: Provided, Both: true})
	if err != nil {
		return nil, err
	}
	return e.Load(image, Host())
}

// paths runs a test with the example hello-http-c on both paths.
func paths(t *testing.T, test func(t *testing.T, url string)) {
	pathsOf(t, helloCode, wasi.Options{}, test)
}

func pathsOf(t *testing.T, compiled func() (*engine.Code, error), options wasi.Options, test func(t *testing.T, url string)) {
	code, err := compiled()
	if err != nil {
		t.Fatal(err)
	}
	if code.World() != engine.WorldHTTP {
		t.Fatalf("World() = %s, want %s", code.World(), engine.WorldHTTP)
	}
	handle, err := code.Func(Signature())
	if err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]engine.Path{"component path": engine.PathComponent, "core path": engine.PathCore} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(&hello{t, options, code, handle, path})
			defer server.Close()
			test(t, server.URL)
		})
	}
}

func (h *hello) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := h.serve(w, r); err != nil {
		h.t.Logf("%s %s: %v", r.Method, r.URL, err)
		Fail(w, err)
	}
}

func (h *hello) serve(w http.ResponseWriter, r *http.Request) error {
	s := NewSession(h.options)
	defer s.Close()
	i, err := h.code.Instantiate(r.Context(), engine.InstanceOptions{Host: s, Deadline: 10 * time.Second, Path: h.path})
	if err != nil {
		return err
	}
	defer i.Close()
	return s.Serve(w, r, func(ctx context.Context, params []byte) error {
		_, err := i.Call(ctx, h.handle, params, nil)
		return err
	})
}

// answerTo sends a request and returns the status and the text of the response.
func answerTo(t *testing.T, r *http.Request) (int, string) {
	t.Helper()
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// TestOutgoingExample: a guest passes requests, bodies and errors of another server on.
func TestOutgoingExample(t *testing.T) {
	target := target(t, false, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/moved":
			http.Redirect(w, r, "http://"+r.Host+"/there", http.StatusFound)
		case "/echo":
			w.WriteHeader(http.StatusAccepted)
			_, _ = io.Copy(w, r.Body)
		default:
			_, _ = io.WriteString(w, r.Method+" "+r.URL.Path)
		}
	})
	client := &http.Transport{DisableCompression: true, DisableKeepAlives: true}
	pathsOf(t, fetchCode, wasi.Options{HTTP: client}, func(t *testing.T, url string) {
		fetch := func(method, path, to string, body []byte, headers ...string) (int, string) {
			t.Helper()
			r := request(t, method, url+path, bytes.NewReader(body))
			r.Header.Set("X-Url", to)
			for _, h := range headers {
				r.Header.Set(h, "3")
			}
			return answerTo(t, r)
		}
		big := bytes.Repeat([]byte("0123456789"), 300_000)
		if status, body := fetch("POST", "/fetch", target.URL+"/echo", big); status != http.StatusAccepted || body != string(big) {
			t.Errorf("POST: status %d, %d bytes came back", status, len(body))
		}
		if status, body := fetch("GET", "/fetch", target.URL+"/moved", nil, "X-Follow"); status != http.StatusOK || body != "GET /there" {
			t.Errorf("redirect: %d %q", status, body)
		}
		if status, body := fetch("GET", "/drain", target.URL+"/there", nil, "X-Count"); status != http.StatusOK || body != "30" {
			t.Errorf("three requests: %d %q, want 30 bytes", status, body)
		}
		if status, body := fetch("GET", "/fetch", "http://127.0.0.1:1/", nil); status != http.StatusBadGateway ||
			!strings.HasPrefix(body, "internal-error") {
			t.Errorf("nobody listens: %d %q", status, body) // only the dialer has codes for connections
		}
	})
}

func TestExample(t *testing.T) {
	paths(t, func(t *testing.T, url string) {
		r := request(t, "GET", url+"/some/where", nil)
		r.Header.Set("X-Name", "Ada")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		if got := string(body); got != "hello from /some/where, Ada\n" || resp.Header.Get("Content-Type") != "text/plain; charset=utf-8" {
			t.Errorf("body %q, header %v", got, resp.Header)
		}
		for path, status := range map[string]int{"/status/404": 404, "/trap": 500, "/empty": 500} {
			resp, err := http.Get(url + path)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != status {
				t.Errorf("GET %s: status %s, want %d", path, resp.Status, status)
			}
		}
	})
}

func TestExampleEchoes(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	paths(t, func(t *testing.T, url string) {
		resp, err := http.Post(url+"/echo", "text/plain", bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if body, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(body, data) {
			t.Errorf("got %d bytes of %d, or different ones; error %v", len(body), len(data), err)
		}
	})
}

// TestExampleWithCurl uses an independent client, which speaks HTTP/1.1 in its own way.
func TestExampleWithCurl(t *testing.T) {
	paths(t, func(t *testing.T, url string) {
		curl := func(stdin string, args ...string) string {
			c := exec.Command("curl", append([]string{"-sS", "--max-time", "20"}, args...)...)
			c.Stdin = strings.NewReader(stdin)
			out, err := c.Output()
			if failed, ok := errors.AsType[*exec.ExitError](err); ok {
				return "curl: " + string(failed.Stderr)
			}
			return string(out)
		}
		for want, got := range map[string]string{
			"hello from /x?y=z, one, two\n": curl("", "-H", "x-name: one", "-H", "x-name: two", url+"/x?y=z"),
			"from a pipe":                   curl("from a pipe", "-T", "-", "-X", "POST", url+"/echo"),
			"418":                           curl("", "-o", "/dev/null", "-w", "%{http_code}", url+"/status/418"),
		} {
			if got != want {
				t.Errorf("curl printed %q, want %q", got, want)
			}
		}
	})
}

// BenchmarkExample measures one request to a fresh instance, without the network.
func BenchmarkExample(b *testing.B) {
	code, err := helloCode()
	if err != nil {
		b.Fatal(err)
	}
	handle, err := code.Func(Signature())
	if err != nil {
		b.Fatal(err)
	}
	for name, path := range map[string]engine.Path{"component path": engine.PathComponent, "core path": engine.PathCore} {
		b.Run(name, func(b *testing.B) {
			h := &hello{nil, wasi.Options{}, code, handle, path}
			r := httptest.NewRequest("GET", "/path", nil)
			for b.Loop() {
				if err := h.serve(httptest.NewRecorder(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
