//go:build !wasip1

package tripodgrpc

import "google.golang.org/grpc"

// ClientConn is a connection to a server. It implements [grpc.ClientConnInterface], for the clients in generated code.
type ClientConn struct{ *grpc.ClientConn }

// NewClient makes a ClientConn for HOST:PORT, dns:///HOST:PORT or passthrough:///HOST:PORT. It connects at the first call.
// In a guest, the host connects, and the instances of a pod share its connections. On other platforms, the ClientConn is
// grpc-go's.
func NewClient(target string, opts ...ClientOption) (*ClientConn, error) {
	d, err := newDialed(target, opts, nil)
	if err != nil {
		return nil, err
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(d.credentials), grpc.WithDefaultCallOptions(d.defaults...),
		grpc.WithChainUnaryInterceptor(d.unary...), grpc.WithChainStreamInterceptor(d.stream...),
	}
	if d.authority != "" {
		options = append(options, grpc.WithAuthority(d.authority))
	}
	if d.userAgent != "" {
		options = append(options, grpc.WithUserAgent(d.userAgent))
	}
	conn, err := grpc.NewClient(target, options...)
	if err != nil {
		return nil, err
	}
	return &ClientConn{conn}, nil
}

var _ grpc.ClientConnInterface = (*ClientConn)(nil)
