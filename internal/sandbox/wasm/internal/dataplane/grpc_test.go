package dataplane

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// statusDetails are the details of the component's errors.
var statusDetails = [][]byte{mustAny(wrapperspb.String("a detail")), mustAny(wrapperspb.Int64(42))}

func mustAny(m proto.Message) []byte {
	packed, err := anypb.New(m)
	if err != nil {
		panic(err)
	}
	b, err := proto.Marshal(packed)
	if err != nil {
		panic(err)
	}
	return b
}

func payload(n int) *pb.Payload { return &pb.Payload{Body: bytes.Repeat([]byte{7}, n)} }

// TestGRPCGo calls methods of every arity with grpc-go, with and without TLS and gzip.
func TestGRPCGo(t *testing.T) {
	s := startServer(t, &echo{})
	for _, overTLS := range []bool{false, true} {
		for name, options := range map[string][]grpc.DialOption{
			"plain": nil, "gzip": {grpc.WithDefaultCallOptions(grpc.UseCompressor(gzip.Name))},
		} {
			t.Run(map[bool]string{false: "h2c", true: "tls"}[overTLS]+"/"+name, func(t *testing.T) {
				testArities(t, s.dial(t, overTLS, options...))
			})
		}
	}
}

func testArities(t *testing.T, client pb.TestServiceClient) {
	for _, size := range []int{0, 1, 5000, 1 << 20} {
		got, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{Payload: payload(size)})
		if err != nil || !proto.Equal(got.Payload, payload(size)) || !strings.HasPrefix(got.Username, "127.0.0.1:") {
			t.Fatalf("unary call with %d bytes = %d bytes, peer %q, %v", size, len(got.GetPayload().GetBody()), got.GetUsername(), err)
		}
	}
	up, err := client.StreamingInputCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 10, 100_000} {
		if err := up.Send(&pb.StreamingInputCallRequest{Payload: payload(n)}); err != nil {
			t.Fatal(err)
		}
	}
	if sum, err := up.CloseAndRecv(); err != nil || sum.AggregatedPayloadSize != 100_011 {
		t.Fatalf("client stream = %v, %v; want 100011", sum, err)
	}
	down, err := client.StreamingOutputCall(t.Context(), &pb.StreamingOutputCallRequest{
		ResponseParameters: []*pb.ResponseParameters{{Size: 3}, {Size: 100_000}, {Size: 0}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{3, 100_000, 0} {
		if m, err := down.Recv(); err != nil || len(m.GetPayload().GetBody()) != want {
			t.Fatalf("message of the server stream = %d bytes, %v; want %d", len(m.GetPayload().GetBody()), err, want)
		}
	}
	if _, err := down.Recv(); err != io.EOF || down.Trailer().Get("x-count")[0] != "done" {
		t.Fatalf("end of the server stream = %v, trailer %v", err, down.Trailer())
	}
	both, err := client.FullDuplexCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 { // in lockstep, so neither side can delay messages
		if err := both.Send(&pb.StreamingOutputCallRequest{Payload: payload(i)}); err != nil {
			t.Fatal(err)
		}
		if m, err := both.Recv(); err != nil || len(m.Payload.Body) != i {
			t.Fatalf("message %d of the bidi stream = %v, %v", i, m, err)
		}
	}
	if err := both.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := both.Recv(); err != io.EOF {
		t.Fatalf("end of the bidi stream = %v, want EOF", err)
	}
}

func TestGRPCMetadataAndStatus(t *testing.T) {
	client := startServer(t, &echo{}).dial(t, false)
	binary := "\x00\xff, \x80"
	ctx := metadata.AppendToOutgoingContext(t.Context(), "echo-text", "plain", "echo-bytes-bin", binary, "echo-bytes-bin", "2nd")
	var header, trailer metadata.MD
	if _, err := client.UnaryCall(ctx, &pb.SimpleRequest{}, grpc.Header(&header), grpc.Trailer(&trailer)); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string][]string{"echo-text": {"plain"}, "echo-bytes-bin": {binary, "2nd"}} {
		if got := header.Get(key); !slices.Equal(got, want) {
			t.Errorf("header %s = %q, want %q", key, got, want)
		}
		if got := trailer.Get("trailing-" + key); !slices.Equal(got, want) {
			t.Errorf("trailer %s = %q, want %q", key, got, want)
		}
	}
	message := "100 % wrong: ü\nnew line"
	_, err := client.UnaryCall(ctx, &pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Code: 9, Message: message}}, grpc.Trailer(&trailer))
	st := status.Convert(err)
	if st.Code() != codes.FailedPrecondition || st.Message() != message {
		t.Errorf("status = %v %q, want FailedPrecondition %q", st.Code(), st.Message(), message)
	}
	details := st.Details()
	if len(details) != 2 || !proto.Equal(details[0].(proto.Message), wrapperspb.String("a detail")) ||
		!proto.Equal(details[1].(proto.Message), wrapperspb.Int64(42)) {
		t.Errorf("status details = %v", details)
	}
	if got := trailer.Get("trailing-echo-text"); !slices.Equal(got, []string{"plain"}) {
		t.Errorf("trailer of a failed call = %q, want plain", got)
	}
}

// TestGRPCHostErrors checks that an error in the host is INTERNAL to the client, and that only the log has its cause.
func TestGRPCHostErrors(t *testing.T) {
	s := startServer(t, &echo{})
	client := s.dial(t, false)
	_, err := client.EmptyCall(t.Context(), &pb.Empty{})
	if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "secret") ||
		!strings.Contains(s.log.String(), "secret of the host") {
		t.Errorf("call with a host error = %v, want Internal without the cause", err)
	}
	_, err = client.CacheableUnaryCall(t.Context(), &pb.SimpleRequest{})
	if status.Code(err) != codes.Internal || !strings.Contains(s.log.String(), "in the invoker") {
		t.Errorf("call with a host panic = %v, want Internal", err)
	}
	_, err = client.UnimplementedCall(t.Context(), &pb.Empty{})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("call of an unimplemented method = %v, want Unimplemented", err)
	}
	if _, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{}); err != nil {
		t.Errorf("next call = %v", err)
	}
}

// TestConnectGo calls methods of every arity with connect-go in its three protocols over HTTP/3, HTTP/2 and h2c.
func TestConnectGo(t *testing.T) {
	s := startServer(t, &echo{})
	for way, c := range s.httpClients(t) {
		for name, options := range map[string][]connect.ClientOption{
			"grpc":         {connect.WithGRPC()},
			"grpc+gzip":    {connect.WithGRPC(), connect.WithSendGzip()},
			"grpc+json":    {connect.WithGRPC(), connect.WithProtoJSON()},
			"grpcweb":      {connect.WithGRPCWeb()},
			"connect":      {},
			"connect+json": {connect.WithProtoJSON(), connect.WithSendGzip()},
		} {
			t.Run(way+"/"+name, func(t *testing.T) { testConnectArities(t, c, options) })
		}
	}
}

func testConnectArities(t *testing.T, c httpClient, options []connect.ClientOption) {
	unary := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](c, c.base+testPath+"UnaryCall", options...)
	for _, size := range []int{0, 10, 100_000} {
		r := connect.NewRequest(&pb.SimpleRequest{Payload: payload(size)})
		r.Header().Set("Echo-Bytes-Bin", connect.EncodeBinaryHeader([]byte("\x00\xff")))
		got, err := unary.CallUnary(t.Context(), r)
		if err != nil || !proto.Equal(got.Msg.Payload, payload(size)) {
			t.Fatalf("unary call with %d bytes = %v", size, err)
		}
		if b, err := connect.DecodeBinaryHeader(got.Header().Get("Echo-Bytes-Bin")); err != nil || string(b) != "\x00\xff" {
			t.Errorf("Echo-Bytes-Bin in header %v = %q, %v", got.Header(), b, err)
		}
		if b, err := connect.DecodeBinaryHeader(got.Trailer().Get("Trailing-Echo-Bytes-Bin")); err != nil || string(b) != "\x00\xff" {
			t.Errorf("Trailing-Echo-Bytes-Bin in trailer %v = %q, %v", got.Trailer(), b, err)
		}
	}
	_, err := unary.CallUnary(t.Context(),
		connect.NewRequest(&pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Code: 5, Message: "not % there"}}))
	var ce *connect.Error
	if !errors.As(err, &ce) || ce.Code() != connect.CodeNotFound || ce.Message() != "not % there" || len(ce.Details()) != 2 {
		t.Fatalf("failed call = %v, want NotFound with two details", err)
	}
	testConnectStreams(t, c, options)
}

func testConnectStreams(t *testing.T, c httpClient, options []connect.ClientOption) {
	up := connect.NewClient[pb.StreamingInputCallRequest, pb.StreamingInputCallResponse](c, c.base+testPath+"StreamingInputCall", options...).
		CallClientStream(t.Context())
	for _, n := range []int{1, 10, 100} {
		if err := up.Send(&pb.StreamingInputCallRequest{Payload: payload(n)}); err != nil {
			t.Fatal(err)
		}
	}
	if sum, err := up.CloseAndReceive(); err != nil || sum.Msg.AggregatedPayloadSize != 111 {
		t.Fatalf("client stream = %v, %v; want 111", sum, err)
	}
	down, err := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"StreamingOutputCall",
		options...).
		CallServerStream(t.Context(),
			connect.NewRequest(&pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 3}, {Size: 30_000}}}))
	if err != nil {
		t.Fatal(err)
	}
	var sizes []int
	for down.Receive() {
		sizes = append(sizes, len(down.Msg().GetPayload().GetBody()))
	}
	if down.Err() != nil || !slices.Equal(sizes, []int{3, 30_000}) || down.ResponseTrailer().Get("X-Count") != "done" {
		t.Fatalf("server stream = messages of %v bytes, %v, trailer %v", sizes, down.Err(), down.ResponseTrailer())
	}
	both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"FullDuplexCall", options...).
		CallBidiStream(t.Context())
	for i := range 3 {
		if err := both.Send(&pb.StreamingOutputCallRequest{Payload: payload(i)}); err != nil {
			t.Fatal(err)
		}
		if m, err := both.Receive(); err != nil || len(m.GetPayload().GetBody()) != i {
			t.Fatalf("message %d of the bidi stream = %v, %v", i, m, err)
		}
	}
	if err := both.CloseRequest(); err != nil {
		t.Fatal(err)
	}
	if _, err := both.Receive(); !errors.Is(err, io.EOF) {
		t.Fatalf("end of the bidi stream = %v, want EOF", err)
	}
	both.CloseResponse()
}

func TestMetrics(t *testing.T) {
	s := startServer(t, &echo{})
	client := s.dial(t, false)
	for range 3 {
		if _, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{Payload: payload(100)}); err != nil {
			t.Fatal(err)
		}
	}
	_, _ = client.UnaryCall(t.Context(), &pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Code: 9}})
	var got MethodStats
	find := func() bool { // polled, because a call is counted after its client has the response
		for _, m := range s.metrics.Snapshot() {
			if m.Procedure == testPath+"UnaryCall" {
				got = m
			}
		}
		return got.InFlight == 0 && got.Codes["FAILED_PRECONDITION"] == 1
	}
	eventually(t, "the calls are counted", find)
	if !maps.Equal(got.Codes, map[string]uint64{"OK": 3, "FAILED_PRECONDITION": 1}) {
		t.Errorf("Codes = %v, want 3 OK and 1 FAILED_PRECONDITION", got.Codes)
	}
	if got.ReceivedBytes < 300 || got.SentBytes < 300 {
		t.Errorf("ReceivedBytes, SentBytes = %d, %d; want at least 300 each", got.ReceivedBytes, got.SentBytes)
	}
	total := uint64(0)
	for _, n := range got.Latency.Counts {
		total += n
	}
	if total != 4 || got.Latency.Sum <= 0 || len(got.Latency.Counts) != len(got.Latency.Bounds)+1 {
		t.Errorf("Latency = %+v, want 4 calls", got.Latency)
	}
}

func TestUnknownContext(t *testing.T) {
	if got := statusOf(context.Background(), &Status{Code: codes.OK}, nil, nil); got.Code != codes.Internal {
		t.Errorf("statusOf(an error with code OK) = %v, want Internal", got.Code)
	}
}
