package grpcclient

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// meter is a wasi.Quota that adds up.
type meter struct {
	held  atomic.Int64
	limit int64 // 0 means none
}

func (m *meter) Take(n int64) bool {
	if held := m.held.Add(n); m.limit > 0 && held > m.limit {
		m.held.Add(-n)
		return false
	}
	return true
}

func (m *meter) Give(n int64) { m.held.Add(-n) }

// guest is a guest that calls a server.
type guest struct {
	t      *testing.T
	meter  meter
	state  *wasi.State
	client *http.Transport
	target string
}

func newGuest(t *testing.T, target string) *guest {
	g := &guest{t: t, target: target}
	g.state = wasi.NewState(wasi.Options{Bytes: &g.meter})
	g.client = &http.Transport{
		Protocols: new(http.Protocols), MaxResponseHeaderBytes: 64 << 10, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: wasihttp.StreamWindow},
	}
	g.client.Protocols.SetHTTP2(true)
	g.client.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(func() {
		g.client.CloseIdleConnections()
		if held := g.meter.held.Load(); held != 0 {
			t.Errorf("%d bytes remain held", held)
		}
	})
	return g
}

// conversation is a call that waits, as a guest does.
type conversation struct {
	*Call
	t    *testing.T
	woke chan struct{}
}

const testMethods = "/grpc.testing.TestService/"

func (g *guest) start(ctx context.Context, method string, change ...func(*Request)) *conversation {
	g.t.Helper()
	r := &Request{Target: g.target, Method: testMethods + method, Timeout: -1, MaxReceive: 4 << 20}
	for _, c := range change {
		c(r)
	}
	call, st := Start(ctx, g.state, g.client, r)
	require.Nil(g.t, st)
	c := &conversation{call, g.t, make(chan struct{}, 1)}
	call.Notify(func() {
		select {
		case c.woke <- struct{}{}:
		default:
		}
	})
	g.t.Cleanup(call.Close)
	return c
}

// wait waits until the call is ready.
func (c *conversation) wait(write bool) {
	c.t.Helper()
	limit := time.After(time.Minute)
	for !c.Ready(write) {
		select {
		case <-c.woke:
		case <-limit:
			c.t.Fatal("the call is not ready after a minute")
		}
	}
}

func (c *conversation) next() Event {
	c.t.Helper()
	c.wait(false)
	return c.Next()
}

// receive returns the next message. It skips the header.
func (c *conversation) receive(m proto.Message) *Event {
	c.t.Helper()
	e := c.next()
	if e.Kind == Header {
		e = c.next()
	}
	if e.Kind != Message {
		return &e
	}
	b, ok := c.Take()
	require.True(c.t, ok)
	require.Len(c.t, b, e.Size)
	require.NoError(c.t, proto.Unmarshal(b, m))
	return nil
}

func (c *conversation) send(m proto.Message) Sending {
	c.t.Helper()
	b, err := proto.Marshal(m)
	require.NoError(c.t, err)
	for {
		c.wait(true)
		if s := c.Send(b); s != Busy {
			return s
		}
	}
}

// end returns the status of a call whose messages are not of interest.
func (c *conversation) end() *dataplane.Status {
	c.t.Helper()
	for {
		e := c.next()
		switch e.Kind {
		case Message:
			c.Take()
		case End:
			return e.Status
		}
	}
}

func (c *conversation) wantCode(code codes.Code, text string) {
	c.t.Helper()
	st := c.end()
	if st == nil || st.Code != code || !strings.Contains(st.Message, text) {
		c.t.Errorf("status = %v; want %v with %q", st, code, text)
	}
}

// service is a test service.
type service struct {
	pb.UnimplementedTestServiceServer
	began chan struct{} // gets a value when a stream begins, if it is not nil
}

func (*service) UnaryCall(ctx context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	in, _ := metadata.FromIncomingContext(ctx)
	if err := grpc.SetHeader(ctx, metadata.Pairs("a", "1", "a-bin", "\x00\xff")); err != nil {
		return nil, err
	}
	if err := grpc.SetTrailer(ctx, metadata.Pairs("z", "2")); err != nil {
		return nil, err
	}
	if s := r.GetResponseStatus(); s != nil {
		st, err := status.New(codes.Code(s.Code), s.Message).WithDetails(&pb.Empty{})
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	}
	_, timed := ctx.Deadline()
	return &pb.SimpleResponse{
		Username: strings.Join(in["key"], ",") + strings.Join(in["key-bin"], ",") + strings.Join(in[":authority"], ","),
		ServerId: map[bool]string{true: "deadline"}[timed],
		Payload:  &pb.Payload{Body: make([]byte, r.GetResponseSize())},
	}, nil
}

func (s *service) FullDuplexCall(stream pb.TestService_FullDuplexCallServer) error {
	if s.began != nil {
		s.began <- struct{}{}
	}
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, p := range r.GetResponseParameters() {
			if err := stream.Send(&pb.StreamingOutputCallResponse{Payload: &pb.Payload{Body: make([]byte, p.Size)}}); err != nil {
				return err
			}
		}
	}
}

func serve(t *testing.T, s *service, opts ...grpc.ServerOption) (server *grpc.Server, address string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server = grpc.NewServer(opts...)
	pb.RegisterTestServiceServer(server, s)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return server, l.Addr().String()
}

// TestUnary: messages, metadata, statuses with details and deadlines pass in both directions, with and without TLS.
func TestUnary(t *testing.T) {
	_, plain := serve(t, &service{})
	fake := httptest.NewUnstartedServer(nil)
	fake.StartTLS() // for its certificate
	defer fake.Close()
	_, secure := serve(t, &service{}, grpc.Creds(credentials.NewServerTLSFromCert(&fake.TLS.Certificates[0])))
	for _, target := range []string{"http://" + plain, "https://" + secure} {
		t.Run(target[:5], func(t *testing.T) {
			g := newGuest(t, target)
			c := g.start(t.Context(), "UnaryCall", func(r *Request) {
				r.Timeout, r.Authority = time.Minute, "a.test"
				r.Metadata = []Entry{{"key", []byte("v")}, {"key-bin", []byte{0, 1}}}
			})
			require.Equal(t, Sent, c.send(&pb.SimpleRequest{ResponseSize: 1 << 20}))
			c.Finish()
			header := c.next()
			require.Equal(t, Header, header.Kind)
			md := map[string]string{}
			for key, v := range dataplane.Metadata(header.Metadata) {
				md[key] = string(v)
			}
			require.Equal(t, map[string]string{"a": "1", "a-bin": "\x00\xff"}, md)
			var reply pb.SimpleResponse
			require.Nil(t, c.receive(&reply))
			require.Equal(t, "v\x00\x01a.test", reply.GetUsername())
			require.Equal(t, "deadline", reply.GetServerId())
			require.Len(t, reply.GetPayload().GetBody(), 1<<20)
			end := c.receive(&reply)
			require.NotNil(t, end)
			require.Nil(t, end.Status)
			require.Equal(t, "2", end.Metadata.Get("Z"))
			require.Equal(t, End, c.Next().Kind, "the end is repeated")

			c = g.start(t.Context(), "UnaryCall")
			c.send(&pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Code: 5, Message: "not \u2713 here\n%"}})
			c.Finish()
			st := c.end()
			require.Equal(t, codes.NotFound, st.Code)
			require.Equal(t, "not \u2713 here\n%", st.Message)
			require.Len(t, st.Details, 1)
		})
	}
}

// TestDuplex: both directions of a stream go on independently, and a guest that does not take a message stops the server.
func TestDuplex(t *testing.T) {
	_, address := serve(t, &service{})
	g := newGuest(t, "http://"+address)
	c := g.start(t.Context(), "FullDuplexCall")
	var reply pb.StreamingOutputCallResponse
	for range 3 {
		require.Equal(t, Sent, c.send(&pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 100_000}, {Size: 0}}}))
		require.Nil(t, c.receive(&reply))
		require.Len(t, reply.GetPayload().GetBody(), 100_000)
		require.Nil(t, c.receive(&reply))
	}
	const many = 100
	var list []*pb.ResponseParameters
	for range many {
		list = append(list, &pb.ResponseParameters{Size: 1 << 20})
	}
	c.send(&pb.StreamingOutputCallRequest{ResponseParameters: list})
	c.Finish()
	for range many {
		require.Nil(t, c.receive(&reply))
		if held := g.meter.held.Load(); held > wasihttp.CallSize+4<<20 {
			t.Fatalf("%d bytes are held", held)
		}
	}
	require.Nil(t, c.end())
}

// TestEnds: a call ends with the right status for each way in which a call can end early.
func TestEnds(t *testing.T) {
	_, address := serve(t, &service{})
	c := newGuest(t, "http://"+address).start(t.Context(), "FullDuplexCall", func(r *Request) { r.Timeout = 50 * time.Millisecond })
	c.wantCode(codes.DeadlineExceeded, "")
	began := make(chan struct{}, 1)
	server, address := serve(t, &service{began: began})
	g := newGuest(t, "http://"+address)
	ctx, cancel := context.WithCancel(t.Context())
	c = g.start(ctx, "FullDuplexCall")
	<-began
	cancel()
	c.wantCode(codes.Canceled, "")
	require.Equal(t, Ended, c.Send(nil))
	c = g.start(t.Context(), "Nothing")
	c.wantCode(codes.Unimplemented, "unknown method")
	c = g.start(t.Context(), "UnaryCall", func(r *Request) { r.MaxReceive = 1 << 20 })
	c.send(&pb.SimpleRequest{ResponseSize: 2 << 20})
	c.Finish()
	c.wantCode(codes.ResourceExhausted, "larger than max")
	c = g.start(t.Context(), "UnaryCall")
	c.send(&pb.SimpleRequest{Payload: &pb.Payload{Body: make([]byte, 5<<20)}}) // the server's limit is 4 MiB
	c.Finish()
	c.wantCode(codes.ResourceExhausted, "larger than max")
	c = g.start(t.Context(), "FullDuplexCall")
	<-began
	server.Stop()
	c.wantCode(codes.Unavailable, "")
	c = g.start(t.Context(), "UnaryCall")
	c.wantCode(codes.Unavailable, address)
}

// TestGoAway: a server that stops gracefully finishes the calls in progress, and the next call gets another connection.
func TestGoAway(t *testing.T) {
	began := make(chan struct{}, 1)
	server, address := serve(t, &service{began: began})
	g := newGuest(t, "http://"+address)
	c := g.start(t.Context(), "FullDuplexCall")
	<-began
	stopped := make(chan struct{})
	go func() { server.GracefulStop(); close(stopped) }()
	var reply pb.StreamingOutputCallResponse
	c.send(&pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 10}}})
	require.Nil(t, c.receive(&reply))
	c.Finish()
	require.Nil(t, c.end())
	<-stopped
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	next := grpc.NewServer()
	pb.RegisterTestServiceServer(next, &service{})
	go func() { _ = next.Serve(l) }()
	defer next.Stop()
	c = g.start(t.Context(), "UnaryCall")
	c.send(&pb.SimpleRequest{})
	c.Finish()
	require.Nil(t, c.end())
}

// TestRefused: requests that cannot be sent have a status.
func TestRefused(t *testing.T) {
	g := newGuest(t, "")
	good := Request{Target: "http://a.test:1", Method: "/a.B/C", Timeout: -1}
	for what, change := range map[string]func(*Request){
		"target": func(r *Request) { r.Target = "a.test:1" }, "path": func(r *Request) { r.Target += "/x" },
		"user": func(r *Request) { r.Target = "http://u@a.test" }, "empty method": func(r *Request) { r.Method = "" },
		"method": func(r *Request) { r.Method = "a.B/C" }, "authority": func(r *Request) { r.Authority = "a b" },
		"key": func(r *Request) { r.Metadata = []Entry{{"Key", nil}} }, "value": func(r *Request) { r.Metadata = []Entry{{"key", []byte("\n")}} },
		"reserved key": func(r *Request) { r.Metadata = []Entry{{"grpc-timeout", []byte("1S")}} },
	} {
		r := good
		change(&r)
		if _, st := Start(t.Context(), g.state, g.client, &r); st == nil || st.Code != codes.InvalidArgument {
			t.Errorf("%s: status %v; want InvalidArgument", what, st)
		}
	}
	if _, st := Start(t.Context(), g.state, nil, &good); st == nil || st.Code != codes.PermissionDenied {
		t.Errorf("without egress: status %v; want PermissionDenied", st)
	}
	g.client.DialContext = func(context.Context, string, string) (net.Conn, error) {
		return nil, &wasihttp.CodeError{Code: "HTTP-request-denied"}
	}
	g.target = "http://denied.test:1"
	g.start(t.Context(), "UnaryCall").wantCode(codes.PermissionDenied, "http://denied.test:1: the pod may not connect")
}

// TestHeld: calls and their messages count, and beyond the limit a call fails with RESOURCE_EXHAUSTED.
func TestHeld(t *testing.T) {
	_, address := serve(t, &service{})
	g := newGuest(t, "http://"+address)
	g.meter.limit = 2*wasihttp.CallSize + 1<<20
	first := g.start(t.Context(), "FullDuplexCall")
	second := g.start(t.Context(), "FullDuplexCall")
	_, st := Start(t.Context(), g.state, g.client,
		&Request{Target: g.target, Method: "/a/b", Timeout: -1, Metadata: []Entry{{"k", make([]byte, 1<<20)}}})
	require.NotNil(t, st)
	second.send(&pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 2 << 20}}})
	second.wantCode(codes.ResourceExhausted, "wasm.max_host_bytes")
	second.Close()
	require.Equal(t, Ended, first.Send(make([]byte, 2<<20)))
	first.wantCode(codes.ResourceExhausted, "wasm.max_host_bytes")
}

// TestFormatTimeout: a timeout has at most eight digits and is never shorter than asked.
func TestFormatTimeout(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0n", 5: "5n", time.Second: "1000000u", time.Second + 1: "1000001u", time.Hour: "3600000m", 1<<63 - 1: "2562048H",
	} {
		if got := formatTimeout(d); got != want {
			t.Errorf("formatTimeout(%v) = %s; want %s", d, got, want)
		}
	}
}
