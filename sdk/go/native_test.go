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

// TestNative: the same server runs as a real grpc-go server.
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
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
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
	if info := s.GetServiceInfo()["grpc.testing.TestService"]; len(info.Methods) != len(native.GetServiceInfo()["grpc.testing.TestService"].Methods) {
		t.Errorf("GetServiceInfo = %v; want grpc-go's", info)
	}
}
