package dataplane

import (
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestH2Spec runs the conformance suite h2spec against the TCP sockets of a pod. Its requests are plain HTTP: a gRPC
// method refuses them before some of its cases have sent everything.
func TestH2Spec(t *testing.T) {
	suite, err := filepath.Abs("../../../../../build/tools/h2spec")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(suite); err != nil {
		t.Skip("the suite is not built; make build/tools/h2spec builds it")
	}
	handler := NewHTTP(Options{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // fails if the suite resets the stream
		_, _ = io.WriteString(w, "hello, world")
	}))
	s := startServer(t, nil, func(_ *GRPCOptions, c *Config, _ *Material) { c.Handler = handler })
	for socket, address := range map[string]string{"cleartext": s.CleartextAddress, "tls": s.TLSAddress} {
		t.Run(socket, func(t *testing.T) {
			host, port, err := net.SplitHostPort(address)
			if err != nil {
				t.Fatal(err)
			}
			args := []string{"-h", host, "-p", port, "-S"}
			if socket == "tls" {
				args = append(args, "-t", "-k")
			}
			out, err := exec.CommandContext(t.Context(), suite, args...).CombinedOutput()
			if err != nil || !strings.Contains(string(out), " 0 skipped, 0 failed") {
				t.Errorf("h2spec %q: %v\n%s", args, err, out)
			}
		})
	}
}
