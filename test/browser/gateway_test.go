package browser

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/tripod-run/tripod/test/harness"
)

// example returns a file of examples/wasm/ingress.
func example(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(harness.Root(), "examples/wasm/ingress", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// gateway is a proxy with a configuration of the examples, whose Service is replaced by the address of a pod.
type gateway struct{ config, address string }

var nginx, haproxy = gateway{"nginx.conf", "127.0.0.1:8443"}, gateway{"haproxy.cfg", "127.0.0.1:8444"}

// start runs the proxy in front of the pod with the given IP address until the test ends.
func (g gateway) start(t *testing.T, pod string, argv ...string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil { // nginx's workers are another user
		t.Fatal(err)
	}
	text := strings.ReplaceAll(example(t, g.config), "greeter:80", net.JoinHostPort(pod, "80"))
	if err := os.WriteFile(filepath.Join(dir, g.config), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	script := "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost -keyout tls.key -out tls.crt && cat tls.crt tls.key >tls.pem"
	certificate := exec.Command("sh", "-c", script)
	certificate.Dir = dir
	if out, err := certificate.CombinedOutput(); err != nil {
		t.Fatalf("openssl: %v: %s", err, out)
	}
	c := exec.Command(program(t, argv[0]), append(argv[1:], g.config)...)
	c.Dir = dir
	ended := start(t, c)
	for deadline := time.Now().Add(limit); harness.Listens(g.address) != nil; {
		select {
		case <-ended:
			t.Fatalf("%s has ended", argv[0])
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not listen", argv[0])
		}
	}
}

func startNginx(t *testing.T, pod string) { nginx.start(t, pod, "nginx", "-p", ".", "-c") }

func startHAProxy(t *testing.T, pod string) { haproxy.start(t, pod, "haproxy", "-db", "-f") }

// client returns an HTTP client for one version of HTTP.
func client(t *testing.T, http2 bool) *http.Client {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(!http2)
	protocols.SetHTTP2(http2)
	transport := &http.Transport{Protocols: protocols, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: limit}
}

// TestGateways: nginx and HAProxy, with the configurations of the examples, forward all protocols to a component: native
// gRPC over HTTP/2, gRPC-Web and Connect over HTTP/1.1 and HTTP/2, with streams that are not buffered.
func TestGateways(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	pod := d.RunWasm(t, &harness.PodSpec{Image: harness.GreeterC}).Pod.IP()
	startNginx(t, pod)
	startHAProxy(t, pod)
	for _, g := range []gateway{nginx, haproxy} {
		t.Run(g.config, func(t *testing.T) {
			for method, requests := range map[string][]string{
				"SayHello": {`{"name":"Ada"}`}, "Countdown": {`{"from":3}`}, "Collect": {`{"name":"Ada"}`, `{"name":"Bob"}`},
				"Chat": {`{"name":"Ada"}`, `{"name":"Bob"}`},
			} {
				out := tripod(t, append([]string{"call", "--tls", "--insecure", g.address, greeter[1:] + "/" + method}, requests...)...)
				for want, has := range map[string]bool{"Ada": method != "Countdown", "Bob": len(requests) > 1, `"number":3`: method == "Countdown"} {
					if has && !strings.Contains(out, want) {
						t.Errorf("gRPC, %s: got %q, want %s", method, out, want)
					}
				}
			}
			for version, http2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2": true} {
				c := client(t, http2)
				for contentType, body := range map[string]string{
					"application/json": `{"name":"Ada"}`, "application/grpc-web+proto": "\x00\x00\x00\x00\x05\x0a\x03Ada",
					"application/grpc-web-text": "AAAAAAUKA0FkYQ==",
				} {
					response, err := c.Post("https://"+g.address+greeter+"/SayHello", contentType, strings.NewReader(body))
					if err != nil {
						t.Fatal(err)
					}
					b, err := io.ReadAll(response.Body)
					response.Body.Close()
					if err != nil || !bytes.Contains(b, []byte("Hello, Ada!")) && !bytes.Contains(b, []byte("SGVsbG8sIEFkYSE")) &&
						!bytes.Contains(b, []byte("hlbGxvLCBBZGEh")) {
						t.Errorf("%s over %s: got %s %q, %v", contentType, version, response.Status, b, err)
					}
				}
				watchCountdown(t, c, "https://"+g.address, version)
				// The component answers each message at once.
				message := "\x00\x00\x00\x00\x0e{\"name\":\"Ada\"}"
				response, err := c.Post("https://"+g.address+greeter+"/Chat", "application/connect+json",
					io.MultiReader(strings.NewReader(strings.Repeat(message, 100))))
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(response.Body)
				response.Body.Close()
				if got := bytes.Count(b, []byte("Hello, Ada!")); err != nil || got != 100 {
					t.Errorf("stream in both directions over %s: got %d messages, %s %v", version, got, response.Status, err)
				}
			}
		})
	}
}

// watchCountdown checks that the messages of a server stream arrive one by one.
func watchCountdown(t *testing.T, c *http.Client, base, version string) {
	t.Helper()
	const interval = 300 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	body := "\x00\x00\x00\x00\x1b{\"from\":3,\"intervalMs\":300}"
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, base+greeter+"/Countdown", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/connect+json")
	response, err := c.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var arrivals []time.Time
	for {
		var header [5]byte
		if _, err := io.ReadFull(response.Body, header[:]); err != nil {
			t.Fatalf("countdown over %s after %d messages: %v", version, len(arrivals), err)
		}
		if _, err := io.CopyN(io.Discard, response.Body, int64(binary.BigEndian.Uint32(header[1:]))); err != nil {
			t.Fatal(err)
		}
		arrivals = append(arrivals, time.Now())
		if header[0]&2 != 0 {
			break
		}
	}
	if got := arrivals[len(arrivals)-1].Sub(arrivals[0]); len(arrivals) != 5 || got < 2*interval {
		t.Errorf("countdown over %s: got %d messages within %s, want 5 within about %s", version, len(arrivals), got, 3*interval)
	}
}

// TestManifests: the manifests of the example have no unknown fields, and their routes lead to the Service's port.
func TestManifests(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme} {
		utilruntime.Must(add(scheme))
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	objects := map[string]int{}
	for _, file := range []string{"greeter.yaml", "ingress.yaml"} {
		for document := range strings.SplitSeq(example(t, file), "\n---\n") {
			object, kind, err := decoder.Decode([]byte(document), nil, nil)
			if err != nil {
				t.Errorf("%s: %v", file, err)
				continue
			}
			objects[kind.Kind]++
			switch o := object.(type) {
			case *corev1.Service:
				if p := o.Spec.Ports[0]; o.Name != "greeter" || p.Name != "h2c" || p.Port != 80 || *p.AppProtocol != "kubernetes.io/h2c" {
					t.Errorf("service: got %+v", o.Spec)
				}
			case *networkingv1.Ingress:
				if s := o.Spec.Rules[0].HTTP.Paths[0].Backend.Service; s.Name != "greeter" || s.Port.Name != "h2c" {
					t.Errorf("backend of %s: got %+v", o.Name, s)
				}
			}
		}
	}
	if objects["Deployment"] != 1 || objects["Service"] != 1 || objects["Ingress"] != 2 || len(objects) != 3 {
		t.Errorf("objects: got %v", objects)
	}
	if got := strings.Count(example(t, "gateway.yaml"), "backendRefs: [{name: greeter, port: 80}]"); got != 2 {
		t.Errorf("routes to the service: got %d, want 2", got)
	}
}
