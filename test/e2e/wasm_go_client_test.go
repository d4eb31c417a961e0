package e2e

import (
	"bytes"
	"context"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/tripod-run/tripod/test/harness"
)

// upstream is a grpc-go server outside of the node's pods.
type upstream struct {
	pb.UnimplementedTestServiceServer
	ended chan error // of the contexts of streams
}

func (u *upstream) UnaryCall(ctx context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	in, _ := metadata.FromIncomingContext(ctx)
	if err := grpc.SetHeader(ctx, metadata.Pairs("x-echo", strings.Join(in["x-in"], ","))); err != nil {
		return nil, err
	}
	if err := grpc.SetTrailer(ctx, metadata.Pairs("x-end-bin", strings.Join(in["x-in-bin"], ","))); err != nil {
		return nil, err
	}
	if s := r.GetResponseStatus(); s != nil {
		st, err := status.New(codes.Code(s.Code), s.Message).WithDetails(&pb.Empty{})
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	}
	host := strings.Join(in[":authority"], "")
	return &pb.SimpleResponse{Hostname: host, Payload: &pb.Payload{Body: bytes.Repeat([]byte("x"), int(r.GetResponseSize()))}}, nil
}

func (u *upstream) StreamingInputCall(s pb.TestService_StreamingInputCallServer) error {
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

func (u *upstream) StreamingOutputCall(r *pb.StreamingOutputCallRequest, s pb.TestService_StreamingOutputCallServer) error {
	for _, p := range r.GetResponseParameters() {
		if err := s.Send(&pb.StreamingOutputCallResponse{Payload: &pb.Payload{Body: make([]byte, p.Size)}}); err != nil {
			return err
		}
	}
	return nil
}

func (u *upstream) FullDuplexCall(s pb.TestService_FullDuplexCallServer) error {
	for {
		r, err := s.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			<-s.Context().Done()
			u.ended <- s.Context().Err()
			return err
		}
		if err := s.Send(&pb.StreamingOutputCallResponse{Payload: r.GetPayload()}); err != nil {
			return err
		}
	}
}

// TestWasmGoClient: a Go guest calls other servers with the clients of generated code, in all four arities: a grpc-go
// server, and itself in another pod. Metadata, statuses, deadlines and cancellation pass through, and the pod's allow-list
// applies.
func TestWasmGoClient(t *testing.T) {
	image := pushWasm(t, "../../test/guests/caller", "pushed/caller:1")
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	u := &upstream{ended: make(chan error, 1)}
	server := grpc.NewServer()
	pb.RegisterTestServiceServer(server, u)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	start := func(target string, pod ...harness.PodOption) (*harness.Container, pb.TestServiceClient) {
		c := d.RunWasm(t, &harness.PodSpec{Image: image, Pod: pod, Container: []harness.ContainerOption{env("UPSTREAM", "http://"+target)}})
		conn, err := grpc.NewClient(net.JoinHostPort(c.Pod.IP(), "80"), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return c, pb.NewTestServiceClient(conn)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // includes the compilation, on a busy machine
	defer cancel()

	// The second pod calls the first one, which calls the server.
	probe := d.RunWasm(t, &harness.PodSpec{Image: image, Container: []harness.ContainerOption{env("UPSTREAM", "http://unused:1")}})
	address := net.JoinHostPort(harness.NodeAddress(t, probe.Pod.IP()), port)
	first, _ := start(address)
	_, client := start(net.JoinHostPort(first.Pod.IP(), "80"), annotate("egress", first.Pod.IP()+":80"))

	var header, trailer metadata.MD
	reply, err := client.UnaryCall(metadata.AppendToOutgoingContext(ctx, "x-in", "1", "x-in", "2", "x-in-bin", "\x00\xff"),
		&pb.SimpleRequest{ResponseSize: 3 << 20}, grpc.Header(&header), grpc.Trailer(&trailer))
	if err != nil || len(reply.GetPayload().GetBody()) != 3<<20 || reply.GetHostname() != address {
		t.Errorf("UnaryCall: got %d bytes for %q, error %v", len(reply.GetPayload().GetBody()), reply.GetHostname(), err)
	}
	if !slices.Equal(header["x-echo"], []string{"1,2"}) || !slices.Equal(trailer["x-end-bin"], []string{"\x00\xff"}) {
		t.Errorf("metadata: got header %v and trailer %v", header, trailer)
	}
	_, err = client.UnaryCall(ctx, &pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Code: 5, Message: "✓ 100%"}})
	if st := status.Convert(err); st.Code() != codes.NotFound || st.Message() != "✓ 100%" || len(st.Details()) != 1 {
		t.Errorf("status: got %v with details %v", st, st.Details())
	}
	// The guest accepts 4 MiB.
	_, err = client.UnaryCall(ctx, &pb.SimpleRequest{ResponseSize: 4 << 20}, grpc.MaxCallRecvMsgSize(8<<20))
	wantCode(t, err, codes.ResourceExhausted)

	up, err := client.StreamingInputCall(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if err := up.Send(&pb.StreamingInputCallRequest{Payload: &pb.Payload{Body: make([]byte, 100_000)}}); err != nil {
			t.Fatal(err)
		}
	}
	if sum, err := up.CloseAndRecv(); err != nil || sum.GetAggregatedPayloadSize() != 1_000_000 {
		t.Errorf("StreamingInputCall: got %v, error %v", sum, err)
	}
	down, err := client.StreamingOutputCall(ctx,
		&pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 500_000}, {Size: 0}, {Size: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{500_000, 0, 1} {
		if m, err := down.Recv(); err != nil || len(m.GetPayload().GetBody()) != size {
			t.Errorf("StreamingOutputCall: got %d bytes, error %v; want %d", len(m.GetPayload().GetBody()), err, size)
		}
	}
	if _, err := down.Recv(); err != io.EOF {
		t.Errorf("StreamingOutputCall: got %v, want the end", err)
	}
	cancelled, stop := context.WithCancel(ctx)
	both, err := client.FullDuplexCall(cancelled)
	if err != nil {
		t.Fatal(err)
	}
	for k := range 5 { // each message waits for the answer to the one before
		if err := both.Send(&pb.StreamingOutputCallRequest{Payload: &pb.Payload{Body: make([]byte, k)}}); err != nil {
			t.Fatal(err)
		}
		if m, err := both.Recv(); err != nil || len(m.GetPayload().GetBody()) != k {
			t.Fatalf("FullDuplexCall: got %v, error %v", m, err)
		}
	}
	stop()
	select {
	case err := <-u.ended:
		if err != context.Canceled {
			t.Errorf("the server's context: got %v, want Canceled", err)
		}
	case <-time.After(waitLimit):
		t.Error("the cancellation did not reach the server")
	}

	limited, client := start(address, annotate("egress", "other.test:1"))
	_, err = client.UnaryCall(ctx, &pb.SimpleRequest{})
	wantCode(t, err, codes.PermissionDenied)
	limited.Pod.Remove()
	_, client = start(net.JoinHostPort(first.Pod.IP(), "81"))
	_, err = client.UnaryCall(ctx, &pb.SimpleRequest{})
	wantCode(t, err, codes.Unavailable)
}
