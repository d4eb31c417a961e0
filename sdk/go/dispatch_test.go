package tripodgrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

// fakeHost is a call without a host. It notes what the server does.
type fakeHost struct {
	requests [][]byte
	log      []string
	replies  [][]byte
}

func (h *fakeHost) receive(bool) ([]byte, error) {
	if len(h.requests) == 0 {
		return nil, io.EOF
	}
	m := h.requests[0]
	h.requests = h.requests[1:]
	return m, nil
}

func (h *fakeHost) send(m []byte) error {
	h.log = append(h.log, "send")
	h.replies = append(h.replies, m)
	return nil
}

func (h *fakeHost) sendHeader() error {
	h.log = append(h.log, "send header")
	return nil
}
func (h *fakeHost) setHeader(key, value string)  { h.log = append(h.log, "header "+key+"="+value) }
func (h *fakeHost) setTrailer(key, value string) { h.log = append(h.log, "trailer "+key+"="+value) }

// service answers as its request asks.
type testService struct {
	pb.UnimplementedTestServiceServer
	late grpc.ServerStream // the stream of a call that has ended
}

func (*testService) UnaryCall(ctx context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	method, _ := grpc.Method(ctx)
	switch r.GetResponseStatus().GetMessage() {
	case "panic":
		panic("as requested")
	case "plain":
		return nil, errors.New("plain")
	case "context":
		return nil, fmt.Errorf("wrapped: %w", context.DeadlineExceeded)
	case "details":
		st, err := status.New(codes.NotFound, "details").WithDetails(&pb.Empty{})
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	case "metadata":
		err := errors.Join(
			grpc.SetHeader(ctx, metadata.Pairs("Key", "1", "bin-bin", "\x00", "grpc-status", "7")),
			grpc.SendHeader(ctx, metadata.Pairs("key", "2")), grpc.SetTrailer(ctx, metadata.Pairs("end", "3")),
		)
		if late := grpc.SetHeader(ctx, metadata.Pairs("key", "4")); err == nil && late == nil {
			return nil, errors.New("a header was set after it was sent")
		}
		return &pb.SimpleResponse{}, err
	case "bad metadata":
		return nil, grpc.SetHeader(ctx, metadata.Pairs("good", "1", "bad key", "2"))
	case "large":
		return &pb.SimpleResponse{Username: strings.Repeat("x", 2000)}, nil
	}
	return &pb.SimpleResponse{Username: method}, nil
}

func (*testService) StreamingInputCall(s grpc.ClientStreamingServer[pb.StreamingInputCallRequest, pb.StreamingInputCallResponse]) error {
	var sum int32
	for {
		r, err := s.Recv()
		if err == io.EOF {
			return s.SendAndClose(&pb.StreamingInputCallResponse{AggregatedPayloadSize: sum})
		}
		if err != nil {
			return err
		}
		sum += int32(len(r.GetPayload().GetBody()))
	}
}

func (s *testService) FullDuplexCall(stream grpc.BidiStreamingServer[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse]) error {
	s.late = stream
	for {
		r, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := stream.Send(&pb.StreamingOutputCallResponse{Payload: r.GetPayload()}); err != nil {
			return err
		}
	}
}

const methods = "/grpc.testing.TestService/"

// call serves one call of a new server.
func call(t *testing.T, method string, h *fakeHost, requests []proto.Message, opts ...ServerOption) *status.Status {
	t.Helper()
	for _, r := range requests {
		b, err := proto.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		h.requests = append(h.requests, b)
	}
	s := NewServer(opts...)
	pb.RegisterTestServiceServer(s, &testService{})
	return s.handle(t.Context(), method, h)
}

func asking(what string) []proto.Message {
	return []proto.Message{&pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Message: what}}}
}

func TestStatus(t *testing.T) {
	for _, c := range []struct {
		method   string
		requests []proto.Message
		code     codes.Code
		message  string
	}{
		{"UnaryCall", asking(""), codes.OK, ""},
		{"UnaryCall", asking("panic"), codes.Internal, "panic in the handler"},
		{"UnaryCall", asking("plain"), codes.Unknown, "plain"},
		{"UnaryCall", asking("context"), codes.DeadlineExceeded, "wrapped"},
		{"UnaryCall", asking("details"), codes.NotFound, "details"},
		{"UnaryCall", asking("bad metadata"), codes.Internal, "illegal characters"},
		{"UnaryCall", asking("large"), codes.ResourceExhausted, "larger than max"},
		{"UnaryCall", asking(strings.Repeat("x", 2000)), codes.ResourceExhausted, "larger than max"},
		{"UnaryCall", nil, codes.Internal, "no message"},
		{"EmptyCall", []proto.Message{&pb.Empty{}}, codes.Unimplemented, "not implemented"},
		{"Nothing", nil, codes.Unimplemented, "unknown method Nothing"},
	} {
		h := &fakeHost{}
		st := call(t, methods+c.method, h, c.requests, MaxRecvMsgSize(1000), MaxSendMsgSize(1000))
		if st.Code() != c.code || !strings.Contains(st.Message(), c.message) {
			t.Errorf("%s %v = %v; want %v %q", c.method, c.requests, st, c.code, c.message)
		}
		if want := map[bool]int{true: 1}[c.code == codes.OK]; len(h.replies) != want {
			t.Errorf("%s %v: %d replies, want %d", c.method, c.requests, len(h.replies), want)
		}
	}
	if st := call(t, "/other.Service/Call", &fakeHost{}, nil); st.Code() != codes.Unimplemented {
		t.Errorf("unknown service: %v", st)
	}
	if st := call(t, methods+"UnaryCall", &fakeHost{requests: [][]byte{{0xff}}}, nil); st.Code() != codes.Internal {
		t.Errorf("malformed request: %v", st)
	}
	if st := call(t, methods+"UnaryCall", &fakeHost{}, asking("details")); len(st.Details()) != 1 {
		t.Errorf("details = %v; want one", st.Details())
	}
}

func TestMetadata(t *testing.T) {
	h := &fakeHost{}
	if st := call(t, methods+"UnaryCall", h, asking("metadata")); st.Code() != codes.OK {
		t.Fatal(st)
	}
	slices.Sort(h.log[:2]) // one map of metadata
	want := []string{"header bin-bin=\x00", "header key=1", "header key=2", "send header", "trailer end=3", "send"}
	if !slices.Equal(h.log, want) {
		t.Errorf("calls = %q; want %q", h.log, want)
	}
}

func TestStreams(t *testing.T) {
	payload := &pb.Payload{Body: make([]byte, 10)}
	in := []proto.Message{&pb.StreamingInputCallRequest{Payload: payload}, &pb.StreamingInputCallRequest{Payload: payload}}
	h := &fakeHost{}
	if st := call(t, methods+"StreamingInputCall", h, in); st.Code() != codes.OK || len(h.replies) != 1 || h.replies[0][1] != 20 {
		t.Errorf("StreamingInputCall = %v, replies %x; want the sum 20", st, h.replies)
	}
	h = &fakeHost{}
	duplex := []proto.Message{&pb.StreamingOutputCallRequest{Payload: payload}, &pb.StreamingOutputCallRequest{}}
	if st := call(t, methods+"FullDuplexCall", h, duplex); st.Code() != codes.OK || len(h.replies) != 2 {
		t.Errorf("FullDuplexCall = %v, %d replies; want 2", st, len(h.replies))
	}
}

// TestLateGoroutine: a stream refuses everything after its call, so that a goroutine that is left over cannot write to
// the next call of its instance.
func TestLateGoroutine(t *testing.T) {
	impl, h := &testService{}, &fakeHost{}
	s := NewServer()
	pb.RegisterTestServiceServer(s, impl)
	if st := s.handle(t.Context(), methods+"FullDuplexCall", h); st.Code() != codes.OK {
		t.Fatal(st)
	}
	late := impl.late
	late.SetTrailer(metadata.Pairs("a", "b"))
	for what, err := range map[string]error{
		"SendMsg": late.SendMsg(&pb.Empty{}), "RecvMsg": late.RecvMsg(&pb.Empty{}),
		"SetHeader": late.SetHeader(metadata.Pairs("a", "b")), "SendHeader": late.SendHeader(nil),
	} {
		if err == nil {
			t.Errorf("%s after the call succeeded", what)
		}
	}
	if len(h.log) > 0 {
		t.Errorf("calls of the host = %q; want none", h.log)
	}
}

func TestInterceptors(t *testing.T) {
	var log []string
	unary := func(name string) grpc.UnaryServerInterceptor {
		return func(ctx context.Context, r any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			log = append(log, name+info.FullMethod)
			return next(ctx, r)
		}
	}
	stream := func(name string) grpc.StreamServerInterceptor {
		return func(impl any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			log = append(log, fmt.Sprint(name, info.FullMethod, info.IsClientStream, info.IsServerStream))
			return next(impl, s)
		}
	}
	options := []ServerOption{
		UnaryInterceptor(unary("a")), ChainUnaryInterceptor(unary("b"), unary("c")),
		StreamInterceptor(stream("d")), ChainStreamInterceptor(stream("e")),
	}
	call(t, methods+"UnaryCall", &fakeHost{}, asking(""), options...)
	call(t, methods+"StreamingInputCall", &fakeHost{}, nil, options...)
	const in = methods + "StreamingInputCall"
	want := []string{"a" + methods + "UnaryCall", "b" + methods + "UnaryCall", "c" + methods + "UnaryCall", "d" + in + "true false",
		"e" + in + "true false"}
	if !slices.Equal(log, want) {
		t.Errorf("order = %q; want %q", log, want)
	}
}

func TestDescribe(t *testing.T) {
	s := NewServer()
	if _, _, err := s.describe(); err == nil || !strings.Contains(err.Error(), "no services") {
		t.Errorf("describe without services: %v", err)
	}
	pb.RegisterTestServiceServer(s, &testService{})
	names, files, err := s.describe()
	var set descriptorpb.FileDescriptorSet
	if err != nil || !slices.Equal(names, []string{"grpc.testing.TestService"}) || proto.Unmarshal(files, &set) != nil {
		t.Fatalf("describe = %v, %v", names, err)
	}
	seen := map[string]bool{}
	for _, f := range set.File {
		for _, needed := range f.Dependency {
			if !seen[needed] {
				t.Errorf("%s comes before %s, which it imports", f.GetName(), needed)
			}
		}
		seen[f.GetName()] = true
	}
	if !seen["grpc/testing/test.proto"] {
		t.Errorf("files = %v; want the service's", seen)
	}
	s.RegisterService(&grpc.ServiceDesc{ServiceName: "made.by.Hand"}, nil)
	if _, _, err := s.describe(); err == nil || !strings.Contains(err.Error(), "made.by.Hand") {
		t.Errorf("describe with a service without descriptors: %v", err)
	}
}

func TestRegisterPanics(t *testing.T) {
	s := NewServer()
	pb.RegisterTestServiceServer(s, &testService{})
	for name, f := range map[string]func(){
		"twice":       func() { pb.RegisterTestServiceServer(s, &testService{}) },
		"wrong type":  func() { NewServer().RegisterService(&pb.TestService_ServiceDesc, 5) },
		"after Serve": func() { s.serving = true; s.RegisterService(&pb.ReconnectService_ServiceDesc, nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: RegisterService did not panic", name)
				}
			}()
			f()
		}()
	}
}
