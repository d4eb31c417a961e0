package dataplane

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/tripod-run/tripod/test/until"
)

// echo is the component of the tests. It implements grpc.testing.TestService, with additional faults.
type echo struct {
	// hold, if set, blocks UnaryCall until it is closed; entered receives a value when UnaryCall is blocked.
	hold    chan struct{}
	entered chan struct{}
}

func (e *echo) Invoke(ctx context.Context, m *Method, c Call) error {
	switch m.Desc.Name() {
	case "UnaryCall":
		return e.unary(ctx, c)
	case "EmptyCall":
		return errors.New("secret of the host") // not a Status
	case "CacheableUnaryCall":
		panic("in the invoker")
	case "StreamingInputCall":
		return e.clientStream(c)
	case "StreamingOutputCall":
		return e.serverStream(ctx, c)
	case "FullDuplexCall":
		return e.bidi(c)
	case "HalfDuplexCall": // never sends a response
		<-ctx.Done()
		return ctx.Err()
	}
	return Errorf(codes.Unimplemented, "not in this test")
}

func (e *echo) unary(ctx context.Context, c Call) error {
	request := &pb.SimpleRequest{}
	if err := receive(c, request); err != nil {
		return err
	}
	for key, value := range Metadata(c.RequestHeader()) {
		if strings.HasPrefix(key, "echo-") {
			if err := SetMetadata(c.ResponseHeader(), key, value); err != nil {
				return err
			}
			if err := SetMetadata(c.ResponseTrailer(), "trailing-"+key, value); err != nil {
				return err
			}
		}
	}
	if e.hold != nil {
		e.entered <- struct{}{}
		select {
		case <-e.hold:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if s := request.GetResponseStatus(); s.GetCode() != 0 {
		return &Status{Code: codes.Code(s.Code), Message: s.Message, Details: statusDetails}
	}
	return send(c, &pb.SimpleResponse{Payload: request.Payload, Username: c.Peer()})
}

func (e *echo) clientStream(c Call) error {
	total := int32(0)
	for {
		request := &pb.StreamingInputCallRequest{}
		err := receive(c, request)
		if err == io.EOF {
			return send(c, &pb.StreamingInputCallResponse{AggregatedPayloadSize: total})
		}
		if err != nil {
			return err
		}
		total += int32(len(request.GetPayload().GetBody()))
	}
}

func (e *echo) serverStream(ctx context.Context, c Call) error {
	request := &pb.StreamingOutputCallRequest{}
	if err := receive(c, request); err != nil {
		return err
	}
	for _, p := range request.ResponseParameters {
		if p.IntervalUs > 0 {
			select {
			case <-time.After(time.Duration(p.IntervalUs) * time.Microsecond):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if err := send(c, &pb.StreamingOutputCallResponse{Payload: &pb.Payload{Body: make([]byte, p.Size)}}); err != nil {
			return err
		}
	}
	c.ResponseTrailer().Set("X-Count", "done")
	return nil
}

func (e *echo) bidi(c Call) error {
	for {
		request := &pb.StreamingOutputCallRequest{}
		err := receive(c, request)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := send(c, &pb.StreamingOutputCallResponse{Payload: request.Payload}); err != nil {
			return err
		}
	}
}

func receive(c Call, m proto.Message) error {
	b, err := c.Receive()
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return Errorf(codes.InvalidArgument, "%v", err)
	}
	return nil
}

func send(c Call, m proto.Message) error {
	b, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	return c.Send(b)
}

// testMethods returns the methods of grpc.testing.TestService.
func testMethods() []*Method {
	return Methods(pb.File_grpc_testing_test_proto.Services().ByName("TestService"))
}

const testPath = "/grpc.testing.TestService/"

// testServer is a Server on loopback with all three kinds of sockets.
type testServer struct {
	*Server
	TLSAddress, CleartextAddress, QUICAddress string
	tls                                       *TLS
	roots                                     *x509.CertPool
	log                                       *logBuffer
	metrics                                   *Metrics
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// invokerFunc adapts a function to an Invoker.
type invokerFunc func(ctx context.Context, m *Method, c Call) error

// Invoke calls f.
func (f invokerFunc) Invoke(ctx context.Context, m *Method, c Call) error { return f(ctx, m, c) }

// startServer serves TestService by invoker, with the configuration modified by change.
func startServer(t testing.TB, invoker Invoker, change ...func(*GRPCOptions, *Config, *Material)) *testServer {
	t.Helper()
	s := &testServer{log: &logBuffer{}, metrics: NewMetrics()}
	logger := slog.New(slog.NewTextHandler(s.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	options := GRPCOptions{
		Options: Options{Metrics: s.metrics, Logger: logger}, Methods: testMethods(), Invoker: invoker, Files: protoregistry.GlobalFiles,
	}
	material, err := SelfSigned([]string{"localhost"}, []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	config := Config{Logger: logger}
	for _, f := range change {
		f(&options, &config, &material)
	}
	s.roots = x509.NewCertPool()
	s.roots.AppendCertsFromPEM(material.Certificate)
	if s.tls, err = NewTLS(material); err != nil {
		t.Fatal(err)
	}
	config.TLS = s.tls
	if config.Handler == nil {
		if config.Handler, err = NewGRPC(options); err != nil {
			t.Fatal(err)
		}
	}
	if s.Server, err = NewServer(config); err != nil {
		t.Fatal(err)
	}
	sockets := listen(t)
	s.TLSAddress, s.CleartextAddress = sockets.TLS.Addr().String(), sockets.Cleartext.Addr().String()
	s.QUICAddress = sockets.QUIC.LocalAddr().String()
	if err := s.Start(sockets); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func listen(t testing.TB) Sockets {
	t.Helper()
	var sockets Sockets
	var err error
	if sockets.TLS, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	if sockets.Cleartext, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	if sockets.QUIC, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
		t.Fatal(err)
	}
	return sockets
}

func (s *testServer) clientTLS() *tls.Config { return &tls.Config{RootCAs: s.roots} }

// dial returns a grpc-go client, over TLS or cleartext.
func (s *testServer) dial(t testing.TB, overTLS bool, options ...grpc.DialOption) pb.TestServiceClient {
	t.Helper()
	return pb.NewTestServiceClient(s.dialConn(t, overTLS, options...))
}

func (s *testServer) dialConn(t testing.TB, overTLS bool, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	address, creds := s.CleartextAddress, insecure.NewCredentials()
	if overTLS {
		address, creds = s.TLSAddress, credentials.NewTLS(s.clientTLS())
	}
	conn, err := grpc.NewClient("passthrough:///"+address, append(options, grpc.WithTransportCredentials(creds))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// httpClients returns an HTTP client and base URL for each of HTTP/3, HTTP/2 over TLS, and h2c.
func (s *testServer) httpClients(t testing.TB) map[string]httpClient {
	t.Helper()
	h3 := &http3.Transport{TLSClientConfig: s.clientTLS()}
	h2, h2c := overHTTP2(s.clientTLS()), overHTTP2(nil)
	t.Cleanup(func() {
		h3.Close()
		h2.CloseIdleConnections()
		h2c.CloseIdleConnections()
	})
	return map[string]httpClient{
		"h3":  {&http.Client{Transport: h3}, "https://" + s.QUICAddress},
		"h2":  {&http.Client{Transport: h2}, "https://" + s.TLSAddress},
		"h2c": {&http.Client{Transport: h2c}, "http://" + s.CleartextAddress},
	}
}

// overHTTP2 returns a transport for HTTP/2 only, over TLS or, if c is nil, over cleartext.
func overHTTP2(c *tls.Config) *http.Transport {
	transport := &http.Transport{TLSClientConfig: c, Protocols: &http.Protocols{}}
	transport.Protocols.SetHTTP2(c != nil)
	transport.Protocols.SetUnencryptedHTTP2(c == nil)
	return transport
}

type httpClient struct {
	*http.Client
	base string
}

// eventually polls until a condition holds.
var eventually = until.Holds
