package cri

import (
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cri/delegate"
)

// Delegate configures another CRI endpoint, to which calls are forwarded.
type Delegate = delegate.Endpoint

// Delegate begins to forward calls to other CRI endpoints. Call it before Interceptors. The result ends the forwarding.
func (s *Server) Delegate(endpoints []Delegate, record delegate.Record) (stop func() error, err error) {
	r, err := delegate.New(delegate.Config{
		Endpoints: endpoints, Node: s.node, Images: s.images, Record: record, Metrics: metricDescriptors(), MaxMessageSize: MaxMessageSize,
		Logger: s.log,
	})
	if err != nil {
		return nil, err
	}
	s.router = r
	return r.Close, nil
}

// Interceptors returns the innermost interceptors of the gRPC server. They forward calls to the delegates; there are none
// without delegates.
func (s *Server) Interceptors() []grpc.ServerOption {
	if s.router == nil {
		return nil
	}
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(s.router.Unary), grpc.ChainStreamInterceptor(s.forwardStream)}
}

// forwardStream passes streams to the delegates. The remembered events are this node's only, and end.
func (s *Server) forwardStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if info.FullMethod == runtimeapi.RuntimeService_GetContainerEvents_FullMethodName && wantsEvents(stream.Context(), HeaderEventsRecent) {
		return handler(srv, stream)
	}
	return s.router.Stream(srv, stream, info, handler)
}
