// Command interopcaller is a guest that runs cases of the public gRPC interop client against another server. EmptyCall runs
// the case in the metadata x-case with the target HOST:PORT in x-target. If the case fails, the guest exits.
package main

import (
	"context"
	"errors"
	"log"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	tripodgrpc "github.com/tripod-run/tripod/sdk/go"
)

func main() {
	log.SetFlags(0)
	server := tripodgrpc.NewServer()
	pb.RegisterTestServiceServer(server, &runner{})
	if err := tripodgrpc.Serve(server); err != nil {
		log.Fatal(err)
	}
}

type runner struct {
	pb.UnimplementedTestServiceServer
}

// cases are those that are not about credentials, balancers or the server.
var cases = map[string]func(context.Context, pb.TestServiceClient, ...grpc.CallOption){
	"empty_unary": interop.DoEmptyUnaryCall, "large_unary": interop.DoLargeUnaryCall,
	"client_streaming": interop.DoClientStreaming, "server_streaming": interop.DoServerStreaming,
	"ping_pong": interop.DoPingPong, "empty_stream": interop.DoEmptyStream,
	"timeout_on_sleeping_server": interop.DoTimeoutOnSleepingServer, "cancel_after_begin": interop.DoCancelAfterBegin,
	"cancel_after_first_response": interop.DoCancelAfterFirstResponse, "custom_metadata": interop.DoCustomMetadata,
	"status_code_and_message": interop.DoStatusCodeAndMessage, "special_status_message": interop.DoSpecialStatusMessage,
}

func (*runner) EmptyCall(ctx context.Context, r *pb.Empty) (*pb.Empty, error) {
	target := strings.Join(metadata.ValueFromIncomingContext(ctx, "x-target"), "")
	conn, err := tripodgrpc.NewClient(target, tripodgrpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	name := strings.Join(metadata.ValueFromIncomingContext(ctx, "x-case"), "")
	switch name {
	case "unimplemented_service":
		interop.DoUnimplementedService(ctx, pb.NewUnimplementedServiceClient(conn))
	case "unimplemented_method":
		// DoUnimplementedMethod wants a *grpc.ClientConn.
		err := conn.Invoke(ctx, "/grpc.testing.TestService/UnimplementedCall", &pb.Empty{}, &pb.Empty{})
		if status.Code(err) != codes.Unimplemented {
			return nil, errors.Join(errors.New("the status is not UNIMPLEMENTED"), err)
		}
	default:
		do, ok := cases[name]
		if !ok {
			return nil, status.Errorf(codes.NotFound, "there is no case %q", name)
		}
		do(ctx, pb.NewTestServiceClient(conn))
	}
	return r, nil
}
