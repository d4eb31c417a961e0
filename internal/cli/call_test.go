package cli

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	"github.com/quic-go/quic-go/http3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
)

// grpcServer serves grpc.health.v1.Health with reflection in clear text.
func grpcServer(t *testing.T) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	healthpb.RegisterHealthServer(s, health.NewServer())
	reflection.Register(s)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return l.Addr().String()
}

// quicServer serves the same services over HTTP/3 and returns its address and the file of its certificate.
func quicServer(t *testing.T) (address, ca string) {
	t.Helper()
	mux := http.NewServeMux()
	const check = "/grpc.health.v1.Health/Check"
	mux.Handle(check, connect.NewUnaryHandler(check,
		func(context.Context, *connect.Request[healthpb.HealthCheckRequest]) (*connect.Response[healthpb.HealthCheckResponse], error) {
			return connect.NewResponse(&healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}), nil
		}))
	mux.Handle(grpcreflect.NewHandlerV1(grpcreflect.NewStaticReflector("grpc.health.v1.Health")))
	template := httptest.NewUnstartedServer(mux)
	template.StartTLS()
	t.Cleanup(template.Close)
	ca = filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, ca, template.Certificate().Raw)
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	s := &http3.Server{Handler: mux, TLSConfig: http3.ConfigureTLSConfig(&tls.Config{Certificates: template.TLS.Certificates})}
	go func() { _ = s.Serve(conn) }()
	t.Cleanup(func() { s.Close(); conn.Close() })
	return conn.LocalAddr().String(), ca
}

func runCall(t *testing.T, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errout bytes.Buffer
	c := (&App{Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errout}).CallCommand()
	c.SetArgs(args)
	c.SetOut(&errout)
	c.SetErr(&errout)
	err = c.ExecuteContext(t.Context())
	return out.String(), errout.String(), err
}

var spaces = regexp.MustCompile(`[ \n]`)

func TestCall(t *testing.T) {
	h2 := grpcServer(t)
	h3, ca := quicServer(t)
	for name, base := range map[string][]string{
		"HTTP/2": {h2}, "HTTP/3": {"--http3", "--ca", ca, "--server-name", "example.com", h3},
		"HTTP/3, any certificate": {"--http3", "--insecure", h3},
	} {
		t.Run(name, func(t *testing.T) {
			call := func(args ...string) string {
				t.Helper()
				out, _, err := runCall(t, "", append(base[:len(base):len(base)], args...)...)
				if err != nil {
					t.Fatalf("call %q: %v", args, err)
				}
				return spaces.ReplaceAllString(out, "")
			}
			if got := call(); !strings.Contains(got, "grpc.health.v1.Health") {
				t.Errorf("services: got %s, want grpc.health.v1.Health among them", got)
			}
			for _, method := range []string{"grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Check", "grpc.health.v1.Health.Check"} {
				if got := call(method); got != `{"status":"SERVING"}` {
					t.Errorf("call %s: got %s, want SERVING", method, got)
				}
			}
			_, stats, err := runCall(t, "{}\n", append(base[:len(base):len(base)], "--repeat", "5", "grpc.health.v1.Health/Check", "-")...)
			if err != nil || !strings.HasPrefix(stats, "5 calls: p50 ") {
				t.Errorf("call with --repeat: got %q, %v; want statistics of 5 calls", stats, err)
			}
		})
	}
}

func TestCallThatFails(t *testing.T) {
	address := grpcServer(t)
	for want, args := range map[string][]string{
		"unknown service":          {address, "grpc.health.v1.Health/Check", `{"service": "nobody"}`},
		"has no method Nothing":    {address, "grpc.health.v1.Health/Nothing"},
		"is not PACKAGE.SERVICE":   {address, "Check"},
		"is not a grpc.health":     {address, "grpc.health.v1.Health/Check", `{"no": 1}`},
		"takes one message, not 2": {address, "grpc.health.v1.Health/Check", "{}", "{}"},
		"need --tls or --http3":    {"--insecure", address},
		"no such file":             {"--tls", "--ca", "/no/such/file", address},
		"a.b":                      {address, "a.b/C"},
		"certificate":              {"--tls", address},
		"DeadlineExceeded":         {"--timeout", "100ms", "--http3", "--insecure", fmt.Sprintf("127.0.0.1:%d", 1)},
	} {
		_, _, err := runCall(t, "", args...)
		if err == nil || !strings.Contains(err.Error(), want) && want != "certificate" {
			t.Errorf("call %q: got error %v, want one with %q", args, err, want)
		}
	}
}

func writePEM(t *testing.T, path string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pemOf(der), 0o600); err != nil {
		t.Fatal(err)
	}
}

func pemOf(der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}) }
