// Command interop is a guest that serves the public gRPC interop tests.
package main

import (
	"fmt"
	"os"

	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"

	tripodgrpc "github.com/tripod-run/tripod/sdk/go"
)

func main() {
	server := tripodgrpc.NewServer()
	testgrpc.RegisterTestServiceServer(server, interop.NewTestServer())
	if err := tripodgrpc.Serve(server); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
