package tripodgrpc

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"

	"google.golang.org/grpc"
)

// Default limits on messages, as in grpc-go.
const (
	defaultMaxReceive = 4 << 20
	defaultMaxSend    = math.MaxInt32
)

// Server is a registry of gRPC services. It implements [grpc.ServiceRegistrar]. Register all services before Serve.
type Server struct {
	options  options
	services map[string]*service
	serving  bool
}

// service is a registered service and its implementation.
type service struct {
	desc    *grpc.ServiceDesc
	impl    any
	methods map[string]*grpc.MethodDesc
	streams map[string]*grpc.StreamDesc
}

type options struct {
	unary               []grpc.UnaryServerInterceptor
	stream              []grpc.StreamServerInterceptor
	maxReceive, maxSend int
}

// ServerOption configures a Server.
type ServerOption func(*options)

// UnaryInterceptor adds an interceptor of unary calls. It is the same as ChainUnaryInterceptor with one interceptor.
func UnaryInterceptor(i grpc.UnaryServerInterceptor) ServerOption { return ChainUnaryInterceptor(i) }

// ChainUnaryInterceptor adds interceptors of unary calls. The first one is the outermost.
func ChainUnaryInterceptor(chain ...grpc.UnaryServerInterceptor) ServerOption {
	return func(o *options) { o.unary = append(o.unary, chain...) }
}

// StreamInterceptor adds an interceptor of streaming calls. It is the same as ChainStreamInterceptor with one
// interceptor.
func StreamInterceptor(i grpc.StreamServerInterceptor) ServerOption { return ChainStreamInterceptor(i) }

// ChainStreamInterceptor adds interceptors of streaming calls. The first one is the outermost.
func ChainStreamInterceptor(chain ...grpc.StreamServerInterceptor) ServerOption {
	return func(o *options) { o.stream = append(o.stream, chain...) }
}

// MaxRecvMsgSize limits the size of a request message in bytes; 4 MiB by default. The pod's annotation
// max-message-bytes applies first.
func MaxRecvMsgSize(n int) ServerOption { return func(o *options) { o.maxReceive = n } }

// MaxSendMsgSize limits the size of a response message in bytes. There is no limit by default, except the host's of 64
// MiB.
func MaxSendMsgSize(n int) ServerOption { return func(o *options) { o.maxSend = n } }

// NewServer returns a server without services.
func NewServer(opts ...ServerOption) *Server {
	s := &Server{options: options{maxReceive: defaultMaxReceive, maxSend: defaultMaxSend}, services: make(map[string]*service)}
	for _, option := range opts {
		option(&s.options)
	}
	return s
}

// RegisterService implements [grpc.ServiceRegistrar]. Like grpc-go, it panics for a service that is already registered,
// for an implementation that lacks methods, and after Serve.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	switch {
	case s.serving:
		panic(fmt.Sprintf("tripodgrpc: RegisterService(%q) after Serve", desc.ServiceName))
	case s.services[desc.ServiceName] != nil:
		panic(fmt.Sprintf("tripodgrpc: service %q is registered twice", desc.ServiceName))
	}
	if impl != nil {
		if want := reflect.TypeOf(desc.HandlerType).Elem(); !reflect.TypeOf(impl).Implements(want) {
			panic(fmt.Sprintf("tripodgrpc: service %q: %T does not implement %v", desc.ServiceName, impl, want))
		}
	}
	made := &service{desc: desc, impl: impl, methods: make(map[string]*grpc.MethodDesc), streams: make(map[string]*grpc.StreamDesc)}
	for i := range desc.Methods {
		made.methods[desc.Methods[i].MethodName] = &desc.Methods[i]
	}
	for i := range desc.Streams {
		made.streams[desc.Streams[i].StreamName] = &desc.Streams[i]
	}
	s.services[desc.ServiceName] = made
}

// GetServiceInfo returns the methods of each service by name, as [grpc.Server.GetServiceInfo] does.
func (s *Server) GetServiceInfo() map[string]grpc.ServiceInfo {
	all := make(map[string]grpc.ServiceInfo)
	for name, registered := range s.services {
		info := grpc.ServiceInfo{Metadata: registered.desc.Metadata}
		for _, m := range registered.desc.Methods {
			info.Methods = append(info.Methods, grpc.MethodInfo{Name: m.MethodName})
		}
		for _, m := range registered.desc.Streams {
			info.Methods = append(info.Methods,
				grpc.MethodInfo{Name: m.StreamName, IsClientStream: m.ClientStreams, IsServerStream: m.ServerStreams})
		}
		all[name] = info
	}
	return all
}

// names returns the full names of the services, sorted.
func (s *Server) names() []string { return slices.Sorted(maps.Keys(s.services)) }

var _ grpc.ServiceRegistrar = (*Server)(nil)
