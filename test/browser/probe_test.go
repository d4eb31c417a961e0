package browser

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

// TestProbes: the probes of a kubelet 1.37 reach component pods: grpc in clear text and over TLS, for the server as a whole
// and for a service, and httpGet over HTTP/1.1, TLS and h2c.
func TestProbes(t *testing.T) {
	prober := built(t, "tools/kubelet-probe")
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	run := func(name, image string, options ...string) string {
		return d.RunWasm(t, &harness.PodSpec{Name: name, Image: image, Pod: []harness.PodOption{annotate(options...)}}).Pod.IP()
	}
	grpc, web, plain := run("grpc", harness.GreeterC), run("http", harness.HelloHTTP), run("plain", harness.GreeterC, "tls", "off")
	for _, c := range []struct{ name, pod, probe, want string }{
		{"grpc", grpc, `{"grpc": {"port": 80}}`, "success"},
		{"grpc, Plaintext", grpc, `{"grpc": {"port": 80, "mode": "Plaintext"}}`, "success"},
		{"grpc over TLS", grpc, `{"grpc": {"port": 443, "mode": "TLS"}}`, "success"},
		{"grpc of a service", grpc, `{"grpc": {"port": 443, "mode": "TLS", "service": "greet.v1.Greeter"}}`, "success"},
		{"grpc of an unknown service", grpc, `{"grpc": {"port": 80, "service": "none"}}`, "failure"},
		{"grpc in clear text on the port for TLS", grpc, `{"grpc": {"port": 443}}`, "failure"},
		{"grpc over TLS on the port for clear text", grpc, `{"grpc": {"port": 80, "mode": "TLS"}}`, "failure"},
		{"grpc over TLS without TLS", plain, `{"grpc": {"port": 443, "mode": "TLS"}}`, "failure"},
		{"httpGet", web, `{"httpGet": {"path": "/healthz", "port": 80}}`, "success"},
		{"httpGet over TLS", web, `{"httpGet": {"path": "/healthz", "port": 443, "scheme": "HTTPS"}}`, "success"},
		{"httpGet over h2c", web, `{"httpGet": {"path": "/healthz", "port": 80, "protocol": "HTTP2"}}`, "success"},
		{"httpGet of a gRPC component", grpc, `{"httpGet": {"path": "/healthz", "port": 80}}`, "failure"},
		{"httpGet over h2c of a gRPC component", grpc, `{"httpGet": {"path": "/healthz", "port": 80, "protocol": "HTTP2"}}`, "failure"},
	} {
		out, err := exec.CommandContext(t.Context(), prober, c.pod, c.probe).CombinedOutput()
		if err != nil || !strings.HasPrefix(string(out), c.want+":") {
			t.Errorf("%s: got %q, %v; want %s", c.name, out, err, c.want)
		}
	}
}
