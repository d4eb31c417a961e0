// Command interopclient runs a case of the public gRPC interop tests against a server: over HTTP/2 by grpc-go, or over
// HTTP/3 by a client of its own, because grpc-go has none. The case's own code exits with 1 if the case fails.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/quic-go/quic-go/http3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

type testCase func(context.Context, testgrpc.TestServiceClient, ...grpc.CallOption)

// cases are all cases of the suite that need no proxy, credentials or second server.
var cases = map[string]testCase{
	"empty_unary":                 interop.DoEmptyUnaryCall,
	"large_unary":                 interop.DoLargeUnaryCall,
	"client_streaming":            interop.DoClientStreaming,
	"server_streaming":            interop.DoServerStreaming,
	"ping_pong":                   interop.DoPingPong,
	"empty_stream":                interop.DoEmptyStream,
	"timeout_on_sleeping_server":  interop.DoTimeoutOnSleepingServer,
	"cancel_after_begin":          interop.DoCancelAfterBegin,
	"cancel_after_first_response": interop.DoCancelAfterFirstResponse,
	"custom_metadata":             interop.DoCustomMetadata,
	"status_code_and_message":     interop.DoStatusCodeAndMessage,
	"special_status_message":      interop.DoSpecialStatusMessage,
	"unimplemented_method":        nil,
	"unimplemented_service":       nil,
}

func main() {
	address := flag.String("address", "", "HOST:PORT of the server")
	quic := flag.Bool("http3", false, "use HTTP/3 with TLS instead of HTTP/2 without")
	name := flag.String("case", "", "the case; without it, the names of all cases are printed")
	flag.Parse()
	if *name == "" {
		for _, name := range slices.Sorted(maps.Keys(cases)) {
			fmt.Println(name)
		}
		return
	}
	if err := run(*address, *quic, *name); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", *name, err)
		os.Exit(1)
	}
}

func run(address string, quic bool, name string) error {
	do, known := cases[name]
	if !known {
		return fmt.Errorf("no such case")
	}
	var conn grpc.ClientConnInterface
	if quic {
		transport := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} // pods make their own certificates
		defer transport.Close()
		conn = &http3Conn{&http.Client{Transport: transport}, "https://" + address}
	} else {
		c, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		defer c.Close()
		conn = c
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	switch name {
	case "unimplemented_method":
		return unimplemented(conn.Invoke(ctx, "/grpc.testing.TestService/UnimplementedCall", &testgrpc.Empty{}, &testgrpc.Empty{}))
	case "unimplemented_service":
		_, err := testgrpc.NewUnimplementedServiceClient(conn).UnimplementedCall(ctx, &testgrpc.Empty{})
		return unimplemented(err)
	}
	do(ctx, testgrpc.NewTestServiceClient(conn))
	return nil
}

func unimplemented(err error) error {
	if status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("got %v, want UNIMPLEMENTED", err)
	}
	return nil
}
