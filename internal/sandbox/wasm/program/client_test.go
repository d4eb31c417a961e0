package program

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// service is a grpc-go client of a service, with messages in JSON.
type service struct {
	t    testing.TB
	conn *grpc.ClientConn
	desc protoreflect.ServiceDescriptor
}

func newService(t testing.TB, conn *grpc.ClientConn, file, name string) *service {
	t.Helper()
	result, err := protosource.Compile(t.Context(), []string{file}, nil)
	require.NoError(t, err)
	files, err := protodesc.NewFiles(result.Set)
	require.NoError(t, err)
	d, err := files.FindDescriptorByName(protoreflect.FullName(name))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return &service{t, conn, d.(protoreflect.ServiceDescriptor)}
}

func (p *pod) overH2C() *grpc.ClientConn {
	conn, err := grpc.NewClient("passthrough:///"+p.cleartext.String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	require.NoError(p.rig.t, err)
	return conn
}

func (p *pod) overTLS() *grpc.ClientConn {
	conn, err := grpc.NewClient("passthrough:///"+p.tls.String(), grpc.WithTransportCredentials(credentials.NewTLS(p.clientTLS())))
	require.NoError(p.rig.t, err)
	return conn
}

// overRouter returns a client that connects like the node's router.
func (p *pod) overRouter() *grpc.ClientConn {
	add := headerOf{"tripod-container": p.ID}
	conn, err := grpc.NewClient("passthrough:///router", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithPerRPCCredentials(add),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", p.rig.dataPath())
		}))
	require.NoError(p.rig.t, err)
	return conn
}

// headerOf is a transport that adds a header to each request.
type headerOf map[string]string

func (h headerOf) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return h, nil
}
func (h headerOf) RequireTransportSecurity() bool { return false }

func (p *pod) clientTLS() *tls.Config {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(p.material.Certificate)
	return &tls.Config{RootCAs: pool, ServerName: "localhost"}
}

// overHTTP3 returns an HTTP/3 client.
func (p *pod) overHTTP3() *http.Client {
	transport := &http3.Transport{TLSClientConfig: p.clientTLS()}
	p.rig.t.Cleanup(func() { transport.Close() })
	return &http.Client{Transport: transport}
}

func (p *pod) faults() *service {
	return newService(p.rig.t, p.overH2C(), examples+"faults-c/faults.proto", "faults.v1.Faults")
}

func (p *pod) greeter() *service {
	return newService(p.rig.t, p.overH2C(), examples+"greeter/greeter.proto", "greet.v1.Greeter")
}

func (s *service) method(name string) protoreflect.MethodDescriptor {
	m := s.desc.Methods().ByName(protoreflect.Name(name))
	require.NotNil(s.t, m, name)
	return m
}

func (s *service) procedure(name string) string { return "/" + string(s.desc.FullName()) + "/" + name }

func (s *service) message(d protoreflect.MessageDescriptor, text string) *dynamicpb.Message {
	m := dynamicpb.NewMessage(d)
	require.NoError(s.t, protojson.Unmarshal([]byte(text), m))
	return m
}

// call makes a unary call.
func (s *service) call(ctx context.Context, method, request string, opts ...grpc.CallOption) (map[string]any, error) {
	m := s.method(method)
	reply := dynamicpb.NewMessage(m.Output())
	if err := s.conn.Invoke(ctx, s.procedure(method), s.message(m.Input(), request), reply, opts...); err != nil {
		return nil, err
	}
	return asMap(s.t, reply), nil
}

// must makes a unary call that must succeed.
func (s *service) must(method, request string) map[string]any {
	s.t.Helper()
	reply, err := s.call(s.t.Context(), method, request)
	require.NoError(s.t, err)
	return reply
}

// stream is one streaming call.
type stream struct {
	grpc.ClientStream
	service *service
	method  protoreflect.MethodDescriptor
}

func (s *service) stream(ctx context.Context, method string) *stream {
	s.t.Helper()
	m := s.method(method)
	c, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: m.IsStreamingClient(), ServerStreams: m.IsStreamingServer()},
		s.procedure(method))
	require.NoError(s.t, err)
	return &stream{c, s, m}
}

func (s *stream) send(text string) error { return s.SendMsg(s.service.message(s.method.Input(), text)) }

func (s *stream) receive() (map[string]any, error) {
	reply := dynamicpb.NewMessage(s.method.Output())
	if err := s.RecvMsg(reply); err != nil {
		return nil, err
	}
	return asMap(s.service.t, reply), nil
}

func asMap(t testing.TB, m *dynamicpb.Message) map[string]any {
	text, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
	require.NoError(t, err)
	var v map[string]any
	require.NoError(t, json.Unmarshal(text, &v))
	return v
}

// post makes a unary call in the Connect protocol with JSON.
func post(t testing.TB, c *http.Client, url, body string) (int, string, *http.Response) {
	t.Helper()
	resp, err := c.Post(url, "application/json", bytes.NewReader([]byte(body)))
	require.NoError(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(data), resp
}

func (p *pod) wide() *service {
	return newService(p.rig.t, p.overH2C(), "testdata/wide-js/wide.proto", "wide.v1.Wide")
}
