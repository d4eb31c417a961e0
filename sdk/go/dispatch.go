package tripodgrpc

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// handle serves one call. It returns nil for the status OK.
func (s *Server) handle(ctx context.Context, procedure string, h host) (st *status.Status) {
	stream := newStream(ctx, procedure, h, &s.options)
	defer stream.close()
	defer func() {
		if p := recover(); p != nil {
			fmt.Fprintf(os.Stderr, "tripodgrpc: panic in %s: %v\n%s", procedure, p, debug.Stack())
			st = status.Newf(codes.Internal, "panic in the handler of %s", procedure)
		}
	}()
	return statusOf(s.dispatch(stream, procedure))
}

// statusOf converts a handler's error as grpc-go does.
func statusOf(err error) *status.Status {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err)
	}
	return st
}

func (s *Server) dispatch(stream *serverStream, procedure string) error {
	name, method, ok := strings.Cut(strings.TrimPrefix(procedure, "/"), "/")
	if !ok {
		return status.Errorf(codes.Unimplemented, "malformed method name %q", procedure)
	}
	registered := s.services[name]
	if registered == nil {
		return status.Errorf(codes.Unimplemented, "unknown service %s", name)
	}
	if m := registered.methods[method]; m != nil {
		return s.unary(stream, registered, m)
	}
	if m := registered.streams[method]; m != nil {
		return s.stream(stream, registered, m)
	}
	return status.Errorf(codes.Unimplemented, "unknown method %s for service %s", method, name)
}

func (s *Server) unary(stream *serverStream, registered *service, m *grpc.MethodDesc) error {
	decode := func(request any) error {
		err := stream.receiveMessage(request, true)
		if err == io.EOF {
			return status.Error(codes.Internal, "the request has no message")
		}
		return err
	}
	reply, err := m.Handler(registered.impl, stream.Context(), decode, s.chainUnary())
	if err != nil {
		return err
	}
	return stream.SendMsg(reply)
}

func (s *Server) stream(stream *serverStream, registered *service, m *grpc.StreamDesc) error {
	stream.blocking = !m.ClientStreams
	chain := s.options.stream
	if len(chain) == 0 {
		return m.Handler(registered.impl, stream)
	}
	info := &grpc.StreamServerInfo{FullMethod: stream.procedure, IsClientStream: m.ClientStreams, IsServerStream: m.ServerStreams}
	var next func(n int) grpc.StreamHandler
	next = func(n int) grpc.StreamHandler {
		if n == len(chain) {
			return m.Handler
		}
		return func(impl any, ss grpc.ServerStream) error { return chain[n](impl, ss, info, next(n+1)) }
	}
	return next(0)(registered.impl, stream)
}

// chainUnary returns the interceptors as one, or nil if there are none.
func (s *Server) chainUnary() grpc.UnaryServerInterceptor {
	chain := s.options.unary
	if len(chain) == 0 {
		return nil
	}
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, last grpc.UnaryHandler) (any, error) {
		var next func(n int) grpc.UnaryHandler
		next = func(n int) grpc.UnaryHandler {
			if n == len(chain) {
				return last
			}
			return func(ctx context.Context, request any) (any, error) { return chain[n](ctx, request, info, next(n+1)) }
		}
		return next(0)(ctx, request)
	}
}
