package browser

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bufbuild/protocompile"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// descriptors returns greeter.proto as an encoded FileDescriptorSet with NO_SIDE_EFFECTS for SayHello, so that Connect's
// client uses GET.
func descriptors(t *testing.T) []byte {
	t.Helper()
	compiler := protocompile.Compiler{Resolver: &protocompile.SourceResolver{
		Accessor: protocompile.SourceAccessorFromMap(map[string]string{"greeter.proto": string(source(t))}),
	}}
	files, err := compiler.Compile(t.Context(), "greeter.proto")
	if err != nil {
		t.Fatal(err)
	}
	file := protodesc.ToFileDescriptorProto(files[0])
	file.Service[0].Method[0].Options = &descriptorpb.MethodOptions{IdempotencyLevel: descriptorpb.MethodOptions_NO_SIDE_EFFECTS.Enum()}
	b, err := proto.Marshal(&descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{file}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// site is the server of the page. Its results arrive on reports.
type site struct {
	*httptest.Server
	config  map[string]any
	reports chan map[string]any
	// once guards the first report, which closes reported.
	once     sync.Once
	reported chan struct{}
}

func newSite(t *testing.T) *site {
	script, err := os.ReadFile(built(t, "browser/page.js"))
	if err != nil {
		t.Fatal(err)
	}
	s := &site{reports: make(chan map[string]any, 1), reported: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = io.WriteString(w,
			`<!doctype html><title>components</title><h1>Components</h1><pre id="results"></pre><script src="/page.js"></script><img src="/reported.png" alt="">`)
	})
	mux.HandleFunc("GET /page.js", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/javascript; charset=utf-8")
		_, _ = w.Write(script)
	})
	mux.HandleFunc("GET /config.json", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(s.config)
	})
	mux.HandleFunc("POST /report", func(_ http.ResponseWriter, r *http.Request) {
		results := map[string]any{}
		if err := json.NewDecoder(r.Body).Decode(&results); err != nil {
			results["report"] = err.Error()
		}
		s.once.Do(func() {
			s.reports <- results
			close(s.reported)
		})
	})
	mux.HandleFunc("GET /reported.png", func(w http.ResponseWriter, r *http.Request) { // delays the end of loading
		select {
		case <-s.reported:
		case <-r.Context().Done():
		}
		w.WriteHeader(http.StatusNotFound)
	})
	s.Server = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

// envScreenshot names a file that gets a picture of the page.
const envScreenshot = "TRIPOD_SCREENSHOT"

// show opens the site in Chromium and returns the page's results.
func (s *site) show(t *testing.T) map[string]any {
	t.Helper()
	args := []string{
		"--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
		"--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE 10.*", "--ignore-certificate-errors",
		"--window-size=900,2200", "--user-data-dir=" + t.TempDir(),
	}
	picture := cmp.Or(os.Getenv(envScreenshot), filepath.Join(t.TempDir(), "page.png"))
	args = append(args, "--screenshot="+picture, s.URL+"/")
	settle(t)
	ended := start(t, exec.Command(program(t, "chromium"), args...))
	select {
	case <-ended: // it takes the picture when the page has loaded, and ends
	case <-time.After(limit):
		t.Fatalf("the page has not reported within %s", limit)
	}
	select {
	case results := <-s.reports:
		return results
	default:
		t.Fatal("Chromium has ended before the page has reported")
		return nil
	}
}

// settle waits until the kernel has checked the addresses of new interfaces for duplicates (RFC 4862, 5.4). Chromium
// aborts requests over HTTP/2 when an address appears.
func settle(t *testing.T) {
	t.Helper()
	until.Holds(t, "all IPv6 addresses are checked", func() bool {
		addresses, err := os.ReadFile("/proc/self/net/if_inet6")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(addresses)) {
			flags, err := strconv.ParseUint(strings.Fields(line)[4], 16, 32)
			if err != nil || flags&unix.IFA_F_TENTATIVE != 0 {
				return false
			}
		}
		return true
	})
}

// TestPage: a page in a real browser calls components from another origin: with Connect's client, gRPC-Web, gRPC-Web's
// text format, GET, JSON and cookies, on the pod's address, and through gateways over HTTP/2. A page that is not allowed
// gets nothing.
func TestPage(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	image := cacheable(t)
	s := newSite(t)
	run := func(name, image string, options ...string) string {
		return d.RunWasm(t, &harness.PodSpec{Name: name, Image: image, Pod: []harness.PodOption{annotate(options...)}}).Pod.IP()
	}
	allowed := run("allowed", image, "cors-origins", "https://other.example, "+s.URL)
	startNginx(t, allowed)
	startHAProxy(t, allowed)
	s.config = map[string]any{
		"descriptors": base64.StdEncoding.EncodeToString(descriptors(t)),
		"bases": map[string]string{
			"allowed": "http://" + allowed, "nginx": "https://" + nginx.address, "haproxy": "https://" + haproxy.address,
			"cookies": "http://" + run("cookies", image, "cors-origins", s.URL, "cors-credentials", "true"),
			"all":     "http://" + run("all", image, "cors-origins", "*"),
			"refused": "http://" + run("refused", image, "cors-origins", "https://other.example"),
			"off":     "http://" + run("off", image),
		},
		"http": "http://" + run("http", harness.HelloHTTP, "cors-origins", "*") + "/",
	}
	results := s.show(t)

	stub := map[string]any{"message": "Hello, Ada!", "id": "42", "numbers": []any{3.0, 2.0, 1.0, 0.0}, "code": 3.0, "details": 1.0}
	text := map[string]any{"type": "application/grpc-web-text", "ok": true, "frames": 4.0}
	posted := map[string]any{"message": "Hello, Ada!", "id": "7"}
	calls := map[string]any{
		"Connect": stub, "Connect with GET": stub, "gRPC-Web": stub, "gRPC-Web text": text, "JSON": posted,
		"GET": map[string]any{"message": "Hello, Ada!"}, "cookies": posted,
	}
	for base := range s.config["bases"].(map[string]string) {
		for call, want := range calls {
			name := base + ": " + call
			got, _ := results[name].(map[string]any)
			if base == "refused" || base == "off" || call == "cookies" && base != "cookies" {
				// fetch does not tell a page why.
				if reason, _ := got["refused"].(string); !strings.Contains(reason, "Failed to fetch") {
					t.Errorf("%s: got %v, want a refusal", name, results[name])
				}
				continue
			}
			if !reflect.DeepEqual(results[name], want) {
				t.Errorf("%s: got %v, want %v", name, results[name], want)
			}
		}
	}
	if got, _ := results["http"].(string); got != "hello from /\n" {
		t.Errorf("wasi:http component: got %v", results["http"])
	}
}
