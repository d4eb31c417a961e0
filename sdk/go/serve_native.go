//go:build !wasip1

package tripodgrpc

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"

	"google.golang.org/grpc"
)

// defaultAddress is where Serve listens natively, unless TRIPODGRPC_ADDRESS says otherwise.
const defaultAddress = "127.0.0.1:50051"

// Serve serves the services. It never returns in a guest, where the host calls them. On other platforms, it runs a real
// grpc-go server without TLS on the address HOST:PORT in the environment variable TRIPODGRPC_ADDRESS (127.0.0.1:50051
// by default), prints the address to the standard error, and returns an error if it cannot listen.
func Serve(s *Server) error {
	if err := runWarmups(context.Background()); err != nil {
		return fmt.Errorf("tripodgrpc: warm-up: %w", err)
	}
	listener, err := net.Listen("tcp", cmp.Or(os.Getenv("TRIPODGRPC_ADDRESS"), defaultAddress))
	if err != nil {
		return fmt.Errorf("tripodgrpc: %w", err)
	}
	fmt.Fprintln(os.Stderr, "tripodgrpc: a native grpc-go server listens on", listener.Addr())
	return s.native().Serve(listener)
}

// native returns a grpc-go server with the same services and options.
func (s *Server) native() *grpc.Server {
	s.serving = true
	server := grpc.NewServer(
		grpc.ChainUnaryInterceptor(s.options.unary...), grpc.ChainStreamInterceptor(s.options.stream...),
		grpc.MaxRecvMsgSize(s.options.maxReceive), grpc.MaxSendMsgSize(s.options.maxSend),
	)
	for _, name := range s.names() {
		server.RegisterService(s.services[name].desc, s.services[name].impl)
	}
	return server
}
