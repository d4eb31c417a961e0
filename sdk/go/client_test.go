package tripodgrpc

import (
	"context"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// fakeServer is the host's side of calls without a host. It answers with its events.
type fakeServer struct {
	requests []*clientRequest
	events   []clientEvent
	sent     []string
	log      []string
	refuse   error         // of start
	ended    error         // of send
	closed   chan struct{} // closed by close
}

func (f *fakeServer) start(r *clientRequest) (clientHost, error) {
	f.requests, f.closed = append(f.requests, r), make(chan struct{})
	return f, f.refuse
}

func (f *fakeServer) send(m []byte) error {
	f.sent = append(f.sent, string(m))
	return f.ended
}
func (f *fakeServer) finish() { f.log = append(f.log, "finish") }
func (f *fakeServer) close() {
	select {
	case <-f.closed:
	default:
		close(f.closed)
	}
}

// next waits for close after the last event.
func (f *fakeServer) next() (clientEvent, error) {
	if len(f.events) == 0 {
		<-f.closed
		return clientEvent{}, errClosed
	}
	e := f.events[0]
	f.events = f.events[1:]
	return e, nil
}

func replies(list ...clientEvent) []clientEvent {
	return append([]clientEvent{{header: metadata.Pairs("h", "1")}}, list...)
}

func ended(code codes.Code, text string) clientEvent {
	return clientEvent{end: true, trailer: metadata.Pairs("t", "2"), status: status.New(code, text)}
}

func message(t *testing.T, m proto.Message) clientEvent {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return clientEvent{message: b}
}

func newTestClient(t *testing.T, f *fakeServer, opts ...ClientOption) *dialed {
	t.Helper()
	d, err := newDialed("a.test:1", append([]ClientOption{WithTransportCredentials(insecure.NewCredentials())}, opts...), f.start)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestClientTargets: targets are those of grpc-go that name a host, with its default port.
func TestClientTargets(t *testing.T) {
	tls := WithTransportCredentials(credentials.NewTLS(nil))
	for target, want := range map[string]string{
		"a.test": "https://a.test:443", "a.test:1": "https://a.test:1", "dns:///a.test:1": "https://a.test:1",
		"passthrough:///10.0.0.1:80": "https://10.0.0.1:80",
		"[::1]:1":                    "https://[::1]:1", "::1": "https://[::1]:443", "[::1]": "https://[::1]:443",
		"": "", "unix:///run/a": "", "a.test:0": "", "a.test:http": "", "a.test:70000": "", ":1": "", "a:b:c": "", "xds:///a": "",
	} {
		d, err := newDialed(target, []ClientOption{tls}, nil)
		if (err == nil) != (want != "") || err == nil && d.target != want {
			t.Errorf("target %q = %+v, error %v; want %q", target, d, err, want)
		}
	}
	if d, err := newDialed("a.test:1", []ClientOption{WithTransportCredentials(insecure.NewCredentials())}, nil); err != nil ||
		d.target != "http://a.test:1" {
		t.Errorf("without TLS: %+v, error %v", d, err)
	}
	if _, err := newDialed("a.test:1", nil, nil); !errors.Is(err, errNoCredentials) {
		t.Errorf("without credentials: error %v; want %v", err, errNoCredentials)
	}
}

// TestClientUnary: a unary call's metadata, deadline, reply and status.
func TestClientUnary(t *testing.T) {
	f := &fakeServer{events: replies(message(t, &pb.SimpleResponse{Username: "u"}), ended(codes.OK, ""))}
	d := newTestClient(t, f, WithAuthority("b.test"), WithUserAgent("me"))
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "Key", "v", "grpc-x", "dropped"), time.Hour)
	defer cancel()
	var header, trailer metadata.MD
	var finished []error
	reply, err := pb.NewTestServiceClient(d).UnaryCall(ctx, &pb.SimpleRequest{ResponseSize: 1}, grpc.Header(&header), grpc.Trailer(&trailer),
		grpc.OnFinish(func(err error) { finished = append(finished, err) }))
	if err != nil || reply.GetUsername() != "u" {
		t.Fatalf("reply %v, error %v", reply, err)
	}
	r := f.requests[0]
	want := clientRequest{target: "http://a.test:1", authority: "b.test", method: methods + "UnaryCall", timeout: r.timeout,
		metadata: metadata.MD{"key": {"v"}, "user-agent": {"me"}}, maxReceive: 4 << 20}
	if !reflect.DeepEqual(*r, want) || r.timeout <= 0 || r.timeout > int64(time.Hour) {
		t.Errorf("request %+v; want %+v", *r, want)
	}
	if !slices.Equal(f.log, []string{"finish"}) || !slices.Equal(header["h"], []string{"1"}) || !slices.Equal(trailer["t"], []string{"2"}) ||
		len(finished) != 1 || finished[0] != nil {
		t.Errorf("log %v, header %v, trailer %v, finished %v", f.log, header, trailer, finished)
	}
}

// TestClientStatus: how a unary call can fail.
func TestClientStatus(t *testing.T) {
	one := message(t, &pb.SimpleResponse{})
	for what, c := range map[string]struct {
		server fakeServer
		opts   []grpc.CallOption
		code   codes.Code
		text   string
	}{
		"status":        {fakeServer{events: replies(ended(codes.NotFound, "x"))}, nil, codes.NotFound, "x"},
		"trailers only": {fakeServer{events: []clientEvent{ended(codes.NotFound, "x")}}, nil, codes.NotFound, "x"},
		"status after":  {fakeServer{events: replies(one, ended(codes.Aborted, "x"))}, nil, codes.Aborted, "x"},
		"early end":     {fakeServer{events: replies(ended(codes.Aborted, "x")), ended: io.EOF}, nil, codes.Aborted, "x"},
		"no reply":      {fakeServer{events: replies(ended(codes.OK, ""))}, nil, codes.Internal, "no response message"},
		"two replies":   {fakeServer{events: replies(one, one, ended(codes.OK, ""))}, nil, codes.Internal, "another message"},
		"malformed reply": {fakeServer{events: replies(clientEvent{message: []byte{0xff}}, ended(codes.OK, ""))}, nil, codes.Internal,
			"unmarshal"},
		"refused":         {fakeServer{refuse: status.Error(codes.PermissionDenied, "x")}, nil, codes.PermissionDenied, "x"},
		"large request":   {fakeServer{}, []grpc.CallOption{grpc.MaxCallSendMsgSize(1)}, codes.ResourceExhausted, "larger than max"},
		"compressor":      {fakeServer{}, []grpc.CallOption{grpc.UseCompressor(gzip.Name)}, codes.Internal, "gzip"},
		"content subtype": {fakeServer{}, []grpc.CallOption{grpc.CallContentSubtype("json")}, codes.Internal, "json"},
		"credentials": {fakeServer{}, []grpc.CallOption{grpc.PerRPCCredentials(token{secure: true})}, codes.Unauthenticated,
			"insecure connection"},
		"bad credentials": {fakeServer{}, []grpc.CallOption{grpc.PerRPCCredentials(token{key: "b d"})}, codes.Internal, "illegal characters"},
		"good credentials": {fakeServer{events: replies(one, ended(codes.OK, ""))},
			[]grpc.CallOption{grpc.PerRPCCredentials(token{key: "authorization"})}, codes.OK, ""},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := pb.NewTestServiceClient(newTestClient(t, &c.server)).UnaryCall(t.Context(), &pb.SimpleRequest{ResponseSize: 1}, c.opts...)
			if st := status.Convert(err); st.Code() != c.code || !strings.Contains(st.Message(), c.text) {
				t.Errorf("status %v; want %v %q", st, c.code, c.text)
			}
		})
	}
	d := newTestClient(t, &fakeServer{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := pb.NewTestServiceClient(d).UnaryCall(ctx, &pb.SimpleRequest{}); status.Code(err) != codes.Canceled {
		t.Errorf("after the context: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if _, err := pb.NewTestServiceClient(d).UnaryCall(t.Context(), &pb.SimpleRequest{}); status.Code(err) != codes.Canceled {
		t.Errorf("after Close: %v", err)
	}
}

// token is a credential of each call.
type token struct {
	key    string
	secure bool
}

func (k token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{k.key: "secret"}, nil
}
func (k token) RequireTransportSecurity() bool { return k.secure }

// TestClientStream: a stream's messages, header, end and trailer.
func TestClientStream(t *testing.T) {
	f := &fakeServer{events: replies(message(t, &pb.StreamingOutputCallResponse{Payload: &pb.Payload{Body: []byte("b")}}),
		message(t, &pb.StreamingOutputCallResponse{}), ended(codes.OK, ""))}
	s, err := pb.NewTestServiceClient(newTestClient(t, f)).FullDuplexCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if header, err := s.Header(); err != nil || !slices.Equal(header["h"], []string{"1"}) {
		t.Errorf("header %v, error %v", header, err)
	}
	for range 2 {
		if err := s.Send(&pb.StreamingOutputCallRequest{}); err != nil {
			t.Error(err)
		}
		if _, err := s.Recv(); err != nil {
			t.Error(err)
		}
	}
	if err := s.CloseSend(); err != nil || !slices.Equal(f.log, []string{"finish"}) {
		t.Errorf("CloseSend: %v, log %v", err, f.log)
	}
	if err := s.Send(&pb.StreamingOutputCallRequest{}); status.Code(err) != codes.Internal {
		t.Errorf("Send after CloseSend: %v", err)
	}
	for range 2 {
		if _, err := s.Recv(); err != io.EOF {
			t.Errorf("Recv at the end: %v; want EOF", err)
		}
	}
	if trailer := s.Trailer(); !slices.Equal(trailer["t"], []string{"2"}) {
		t.Errorf("trailer %v", trailer)
	}
	if s.Context().Err() == nil {
		t.Error("the stream's context goes on after its end")
	}
	f = &fakeServer{ended: io.EOF, events: []clientEvent{ended(codes.Unavailable, "gone")}}
	if s, err = pb.NewTestServiceClient(newTestClient(t, f)).FullDuplexCall(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&pb.StreamingOutputCallRequest{}); err != io.EOF {
		t.Errorf("Send to a stream that has ended: %v; want EOF", err)
	}
	if _, err := s.Header(); status.Code(err) != codes.Unavailable {
		t.Errorf("Header of a stream without one: %v", err)
	}
}

// TestClientCancel: the end of the context ends a call that waits, and closes it at the host.
func TestClientCancel(t *testing.T) {
	f := &fakeServer{events: replies()}
	ctx, cancel := context.WithCancel(t.Context())
	s, err := pb.NewTestServiceClient(newTestClient(t, f)).FullDuplexCall(ctx)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := s.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("Recv = %v; want Canceled", err)
	}
	<-f.closed
}

// TestClientInterceptors: interceptors run in order around both kinds of calls.
func TestClientInterceptors(t *testing.T) {
	var log []string
	unary := func(name string) grpc.UnaryClientInterceptor {
		return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			log = append(log, name)
			return next(ctx, method, req, reply, cc, opts...)
		}
	}
	stream := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, next grpc.Streamer,
		opts ...grpc.CallOption) (grpc.ClientStream, error) {
		log = append(log, "stream")
		return next(ctx, desc, cc, method, opts...)
	}
	var trailer metadata.MD
	f := &fakeServer{events: []clientEvent{ended(codes.Aborted, "")}}
	client := pb.NewTestServiceClient(newTestClient(t, f, WithUnaryInterceptor(unary("1")), WithChainUnaryInterceptor(unary("2")),
		WithStreamInterceptor(stream),
		WithDefaultCallOptions(grpc.Trailer(&trailer))))
	if _, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{}); status.Code(err) != codes.Aborted || len(trailer) != 1 {
		t.Errorf("UnaryCall: %v, trailer %v", err, trailer)
	}
	if _, err := client.FullDuplexCall(t.Context()); err != nil {
		t.Error(err)
	}
	if want := []string{"1", "2", "stream"}; !slices.Equal(log, want) {
		t.Errorf("interceptors %v; want %v", log, want)
	}
}
