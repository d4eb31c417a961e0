//go:build !wasip1

package tripodgrpc

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
)

// TestNative: the same server runs as a real grpc-go server, and the same client as grpc-go's.
func TestNative(t *testing.T) {
	s := NewServer()
	pb.RegisterTestServiceServer(s, &testService{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	native := s.native()
	go func() { _ = native.Serve(l) }()
	defer native.Stop()
	called := 0
	conn, err := NewClient(l.Addr().String(), WithTransportCredentials(insecure.NewCredentials()), WithUserAgent("me"),
		WithAuthority("a.test"),
		WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			called++
			return next(ctx, method, req, reply, cc, opts...)
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	reply, err := pb.NewTestServiceClient(conn).UnaryCall(ctx, &pb.SimpleRequest{})
	if err != nil || reply.GetUsername() != methods+"UnaryCall" {
		t.Errorf("UnaryCall = %v, %v; want the method's name", reply, err)
	}
	if called != 1 {
		t.Errorf("the interceptor was called %d times; want 1", called)
	}
	if info := s.GetServiceInfo()["grpc.testing.TestService"]; len(info.Methods) != len(native.GetServiceInfo()["grpc.testing.TestService"].Methods) {
		t.Errorf("GetServiceInfo = %v; want grpc-go's", info)
	}
}
