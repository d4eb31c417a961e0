package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

const (
	greeter = "greet.v1.Greeter"
	faults  = "faults.v1.Faults"
)

// startComponent runs a pod with a component from the test registry and connects to it.
func startComponent(t *testing.T, d *harness.Daemon, image, service string, opts ...harness.ContainerOption) (*harness.Container, *served) {
	t.Helper()
	c := d.RunWasm(t, &harness.PodSpec{Image: image, Container: opts})
	return c, dial(t, c.Pod.IP(), service)
}

// env sets an environment variable.
func env(pairs ...string) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) {
		for i := 0; i < len(pairs); i += 2 {
			c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: pairs[i], Value: []byte(pairs[i+1])})
		}
	}
}

// annotate adds annotations of components (vimana.host/…) to the pod.
func annotate(pairs ...string) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		if c.Annotations == nil {
			c.Annotations = map[string]string{}
		}
		for i := 0; i < len(pairs); i += 2 {
			c.Annotations["vimana.host/"+pairs[i]] = pairs[i+1]
		}
	}
}

// TestWasmServesGRPC calls a component in all supported ways: with grpc-go over h2c and TLS, with connect-go over
// HTTP/3 and in Connect's own protocol, in all four arities.
func TestWasmServesGRPC(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	for _, image := range []string{harness.GreeterC, harness.GreeterJS} {
		t.Run(strings.TrimSuffix(image[strings.LastIndexByte(image, '/')+1:], ":1"), func(t *testing.T) {
			c, s := startComponent(t, d, image, greeter, env("POD_NAME", "pod-1"))
			info, err := d.Runtime().ContainerStatus(s.context(), c.ID, true)
			if err != nil || strings.Contains(info.GetInfo()["info"], `"apart":`) {
				t.Errorf("verbose status: error %v, information %v; want a shared worker", err, info.GetInfo()["info"])
			}
			s.everyProtocol(`{"message":"Hello, Ada!","servedBy":"pod-1"}`)
		})
	}
}

// everyProtocol calls a greeter in all supported ways. The reply to Ada is known.
func (s *served) everyProtocol(want string) {
	s.Helper()
	const hello = `{"name":"Ada"}`
	if got := s.call(greeter+"/SayHello", hello); got != want {
		s.Errorf("call over h2c: got %s, want %s", got, want)
	}
	if got := s.callQUIC(greeter+"/SayHello", hello); got != want {
		s.Errorf("call over HTTP/3: got %s, want %s", got, want)
	}
	overTLS := dialWith(s.T, net.JoinHostPort(s.ip, "443"), credentials.NewTLS(anyCertificate))
	overTLS.reflected = s.reflected
	if got := overTLS.call(greeter+"/SayHello", hello); got != want {
		s.Errorf("call over TLS: got %s, want %s", got, want)
	}
	resp, err := s.connect(s.h3, "https://"+net.JoinHostPort(s.ip, "443"), greeter+"/SayHello", connect.WithProtoJSON()).
		CallUnary(s.context(), connect.NewRequest(s.message(s.method(s.T, greeter+"/SayHello").Input(), hello)))
	if err != nil || text(resp.Msg) != want {
		s.Errorf("call in Connect with JSON: got %v, error %v; want %s", resp, err, want)
	}
	s.arities()
	s.arity4OverQUIC()
}

// arities tests the three kinds of streams.
func (s *served) arities() {
	s.Helper()
	numbers, err := s.exchange(greeter+"/Countdown", `{"from":3}`)
	if want := []string{`{"number":3}`, `{"number":2}`, `{"number":1}`, `{}`}; err != nil || !slices.Equal(numbers, want) {
		s.Errorf("Countdown: got %v, error %v; want %v", numbers, err, want)
	}
	all, err := s.exchange(greeter+"/Collect", `{"name":"Ada"}`, `{"name":"Bob"}`)
	if err != nil || len(all) != 1 || !strings.Contains(all[0], "Ada") || !strings.Contains(all[0], "Bob") {
		s.Errorf("Collect: got %v, error %v; want one message with both names", all, err)
	}
	each, err := s.exchange(greeter+"/Chat", `{"name":"Ada"}`, `{"name":"Bob"}`)
	if err != nil || len(each) != 2 || !strings.Contains(each[1], "Bob") {
		s.Errorf("Chat: got %v, error %v; want two messages, the second with Bob", each, err)
	}
}

// arity4OverQUIC sends and receives alternately on a bidirectional stream over HTTP/3.
func (s *served) arity4OverQUIC() {
	s.Helper()
	const method = greeter + "/Chat"
	stream := s.overQUIC(method).CallBidiStream(s.context())
	for _, name := range []string{"Ada", "Bob", "Eve"} {
		if err := stream.Send(s.message(s.method(s.T, method).Input(), fmt.Sprintf(`{"name":%q}`, name))); err != nil {
			s.Fatal(err)
		}
		reply, err := stream.Receive()
		if err != nil || !strings.Contains(text(reply), name) {
			s.Fatalf("reply: got %v, error %v; want %q in it", reply, err, name)
		}
	}
	if err := stream.CloseRequest(); err != nil {
		s.Error(err)
	}
	if _, err := stream.Receive(); !errors.Is(err, io.EOF) {
		s.Errorf("end of the stream: got error %v, want EOF", err)
	}
}

// TestWasmProtocol tests headers, health checks, status details, deadlines and malformed messages.
func TestWasmProtocol(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	_, s := startComponent(t, d, harness.GreeterC, greeter)
	var header metadata.MD
	ctx := metadata.AppendToOutgoingContext(s.context(), "x-request-id", "42")
	if _, err := s.try(ctx, greeter+"/SayHello", `{"name":"Ada"}`, grpc.Header(&header)); err != nil ||
		!slices.Equal(header.Get("x-request-id"), []string{"42"}) {
		t.Errorf("header: got %v, error %v; want x-request-id 42", header, err)
	}
	_, err := s.try(s.context(), greeter+"/SayHello", `{}`)
	wantCode(t, err, codes.InvalidArgument)
	empty := s.message(s.method(t, greeter+"/SayHello").Input(), `{}`)
	wantCode(t, s.conn.Invoke(s.context(), "/"+greeter+"/Nothing", empty, empty), codes.Unimplemented)

	check, err := health.NewHealthClient(s.conn).Check(s.context(), &health.HealthCheckRequest{Service: greeter})
	if err != nil || check.Status != health.HealthCheckResponse_SERVING {
		t.Errorf("health check: got %v, error %v; want SERVING", check, err)
	}
	_, err = health.NewHealthClient(s.conn).Check(s.context(), &health.HealthCheckRequest{Service: "nobody"})
	wantCode(t, err, codes.NotFound)

	_, f := startComponent(t, d, harness.FaultsC, faults)
	_, err = f.try(f.context(), faults+"/Fail", `{"code":9,"message":"not now","details":["CgN0LngSAQE="]}`)
	if st := status.Convert(err); st.Code() != codes.FailedPrecondition || st.Message() != "not now" || len(st.Proto().Details) != 1 ||
		st.Proto().Details[0].TypeUrl != "t.x" {
		t.Errorf("status: got %v, want FailedPrecondition, \"not now\" and one detail", st.Proto())
	}
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	if view, err := f.try(metadata.AppendToOutgoingContext(ctx, "data-bin", "decoded"), faults+"/Inspect", `{}`); err != nil ||
		!strings.Contains(view, `"timeout"`) || !strings.Contains(view, `"data-bin":"decoded"`) {
		t.Errorf("guest's view of the request: got %s, error %v; want a timeout and data-bin", view, err)
	}
	// Messages that are not valid for their type.
	raw, err := grpc.NewClient("passthrough:///"+net.JoinHostPort(f.ip, "80"), grpc.WithTransportCredentials(insecureCredentials),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{})))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	for _, bad := range []string{"\x0a\xff", "\x08", "\x0a\x02x"} {
		var reply []byte
		wantCode(t, raw.Invoke(f.context(), "/"+faults+"/Echo", []byte(bad), &reply), codes.InvalidArgument)
	}
	wantCode(t, raw.Invoke(f.context(), "/"+faults+"/Echo", make([]byte, 5<<20), new([]byte)), codes.ResourceExhausted)
}

// TestWasmTLS: the server uses a certificate from a mounted directory, and requires client certificates.
func TestWasmTLS(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	ca := newAuthority(t)
	dir := t.TempDir()
	ca.issue("greeter.example", dir)
	c := d.RunWasm(t, &harness.PodSpec{
		Image: harness.GreeterC, Pod: []harness.PodOption{annotate("tls", "/tls", "client-auth", "require", "port", "8443")},
		Container: []harness.ContainerOption{mounts(&runtimeapi.Mount{HostPath: dir, ContainerPath: "/tls", Readonly: true})},
	})
	clients := t.TempDir()
	ca.issue("client.example", clients)
	target := net.JoinHostPort(c.Pod.IP(), "8443")
	config := &tls.Config{RootCAs: ca.pool(), ServerName: "greeter.example", Certificates: []tls.Certificate{keyPair(t, clients)}}
	s := dialWith(t, target, credentials.NewTLS(config))
	s.ip, s.reflected = c.Pod.IP(), reflect(t, s.conn, greeter)
	if got := s.call(greeter+"/SayHello", `{"name":"Ada"}`); !strings.Contains(got, "Ada") {
		t.Errorf("call with a certificate: got %s, want Ada in it", got)
	}
	s.h3 = overHTTP3(t, config)
	client := s.connect(s.h3, "https://"+target, greeter+"/SayHello", connect.WithGRPC())
	if _, err := client.CallUnary(s.context(),
		connect.NewRequest(s.message(s.method(t, greeter+"/SayHello").Input(), `{"name":"Ada"}`))); err != nil {
		t.Errorf("call with a certificate over HTTP/3: %v", err)
	}
	// All other clients are refused (W6).
	other := newAuthority(t)
	others := t.TempDir()
	other.issue("client.example", others)
	for name, change := range map[string]func(*tls.Config){
		"no certificate":               func(c *tls.Config) { c.Certificates = nil },
		"another authority's":          func(c *tls.Config) { c.Certificates = []tls.Certificate{keyPair(t, others)} },
		"the server has another name":  func(c *tls.Config) { c.ServerName = "other.example" },
		"the server's CA is not known": func(c *tls.Config) { c.RootCAs = other.pool() },
		"TLS 1.1":                      func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS11, tls.VersionTLS11 },
	} {
		changed := config.Clone()
		change(changed)
		bad := dialWith(t, target, credentials.NewTLS(changed))
		bad.reflected = s.reflected
		_, err := bad.try(bad.context(), greeter+"/SayHello", `{"name":"Ada"}`)
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%s: got error %v, want Unavailable", name, err)
		}
		quic := bad.connect(overHTTP3(t, changed), "https://"+target, greeter+"/SayHello", connect.WithGRPC())
		if _, err := quic.CallUnary(s.context(),
			connect.NewRequest(s.message(s.method(t, greeter+"/SayHello").Input(), `{"name":"Ada"}`))); err == nil {
			t.Errorf("%s over HTTP/3: the call succeeded, want an error", name)
		}
	}
	if conn, err := net.Dial("tcp", net.JoinHostPort(c.Pod.IP(), "80")); err == nil {
		conn.Close()
		t.Error("connection to the cleartext port succeeded, want an error")
	}
	// The server uses a renewed certificate without a restart.
	ca.issue("renewed.example", dir)
	renewed := config.Clone()
	renewed.ServerName = "renewed.example"
	again := dialWith(t, target, credentials.NewTLS(renewed))
	again.reflected = s.reflected
	again.until(greeter+"/SayHello", `{"name":"Ada"}`)
}
