package tripodgrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// errNoCredentials is the error of NewClient without WithTransportCredentials, as in grpc-go.
var errNoCredentials = errors.New("tripodgrpc: no transport security set (use WithTransportCredentials(insecure.NewCredentials()) explicitly or set credentials)")

type clientOptions struct {
	credentials          credentials.TransportCredentials
	authority, userAgent string
	defaults             []grpc.CallOption
	unary                []grpc.UnaryClientInterceptor
	stream               []grpc.StreamClientInterceptor
}

// ClientOption configures a ClientConn.
type ClientOption func(*clientOptions)

// WithTransportCredentials chooses between TLS and cleartext. It is required. In a guest, only the protocol of the
// credentials counts (credentials/insecure, or any credentials for TLS): the host connects, with the authorities of the
// node or of the pod's annotation egress-ca.
func WithTransportCredentials(c credentials.TransportCredentials) ClientOption {
	return func(o *clientOptions) { o.credentials = c }
}

// WithAuthority sets the pseudo-header :authority. In a guest it does not change the name that the server's certificate
// must have.
func WithAuthority(authority string) ClientOption {
	return func(o *clientOptions) { o.authority = authority }
}

// WithUserAgent sets the metadata user-agent.
func WithUserAgent(agent string) ClientOption { return func(o *clientOptions) { o.userAgent = agent } }

// WithDefaultCallOptions sets options of all calls.
func WithDefaultCallOptions(defaults ...grpc.CallOption) ClientOption {
	return func(o *clientOptions) { o.defaults = append(o.defaults, defaults...) }
}

// WithUnaryInterceptor adds an interceptor of unary calls. It is the same as WithChainUnaryInterceptor with one interceptor.
func WithUnaryInterceptor(i grpc.UnaryClientInterceptor) ClientOption {
	return WithChainUnaryInterceptor(i)
}

// WithChainUnaryInterceptor adds interceptors of unary calls. The first one is the outermost. In a guest, their
// *grpc.ClientConn is nil.
func WithChainUnaryInterceptor(chain ...grpc.UnaryClientInterceptor) ClientOption {
	return func(o *clientOptions) { o.unary = append(o.unary, chain...) }
}

// WithStreamInterceptor adds an interceptor of streaming calls. It is the same as WithChainStreamInterceptor with one
// interceptor.
func WithStreamInterceptor(i grpc.StreamClientInterceptor) ClientOption {
	return WithChainStreamInterceptor(i)
}

// WithChainStreamInterceptor adds interceptors of streaming calls. The first one is the outermost. In a guest, their
// *grpc.ClientConn is nil.
func WithChainStreamInterceptor(chain ...grpc.StreamClientInterceptor) ClientOption {
	return func(o *clientOptions) { o.stream = append(o.stream, chain...) }
}

// dialed is a [grpc.ClientConnInterface] over a host: the ClientConn of guests, apart from the host.
type dialed struct {
	clientOptions
	target, host string // such as "https://example.com:443", and what WithAuthority is compared with
	start        func(*clientRequest) (clientHost, error)
	closed       bool
}

// clientRequest is the beginning of a call, as the host gets it.
type clientRequest struct {
	target, authority, method string
	timeout                   int64 // nanoseconds; negative for none
	metadata                  metadata.MD
	maxReceive                uint32
}

// newDialed checks the options and the target.
func newDialed(target string, opts []ClientOption, start func(*clientRequest) (clientHost, error)) (*dialed, error) {
	d := &dialed{start: start}
	for _, option := range opts {
		option(&d.clientOptions)
	}
	if d.credentials == nil {
		return nil, errNoCredentials
	}
	scheme := "https"
	if d.credentials.Info().SecurityProtocol == "insecure" {
		scheme = "http"
	}
	host, err := parseTarget(target)
	if err != nil {
		return nil, err
	}
	d.host, d.target = host, scheme+"://"+host
	return d, nil
}

// parseTarget returns HOST:PORT of a target: [dns:///|passthrough:///]HOST[:PORT] with the default port 443, as in grpc-go.
func parseTarget(target string) (string, error) {
	address := target
	for _, scheme := range []string{"dns:///", "passthrough:///"} {
		address = strings.TrimPrefix(address, scheme)
	}
	if strings.Contains(address, "/") || address == "" {
		return "", fmt.Errorf("tripodgrpc: target %q is not HOST:PORT, dns:///HOST:PORT or passthrough:///HOST:PORT", target)
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		host, port = strings.Trim(address, "[]"), "443"
		if strings.Contains(host, ":") && net.ParseIP(host) == nil {
			return "", fmt.Errorf("tripodgrpc: target %q: %w", target, err)
		}
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || host == "" {
		return "", fmt.Errorf("tripodgrpc: target %q has no host or an invalid port", target)
	}
	return net.JoinHostPort(host, port), nil
}

// callOptions are the grpc.CallOptions of one call.
type callOptions struct {
	header, trailer     []*metadata.MD
	onFinish            []func(error)
	credentials         credentials.PerRPCCredentials
	authority           string
	maxReceive, maxSend int
}

// apply reads options. Those that do not concern a guest have no effect; those that it cannot obey are errors.
func (o *callOptions) apply(opts []grpc.CallOption) error {
	for _, option := range opts {
		switch x := option.(type) {
		case grpc.HeaderCallOption:
			o.header = append(o.header, x.HeaderAddr)
		case grpc.TrailerCallOption:
			o.trailer = append(o.trailer, x.TrailerAddr)
		case grpc.OnFinishCallOption:
			o.onFinish = append(o.onFinish, x.OnFinish)
		case grpc.PerRPCCredsCallOption:
			o.credentials = x.Creds
		case grpc.AuthorityOverrideCallOption:
			o.authority = x.Authority
		case grpc.MaxRecvMsgSizeCallOption:
			o.maxReceive = x.MaxRecvMsgSize
		case grpc.MaxSendMsgSizeCallOption:
			o.maxSend = x.MaxSendMsgSize
		case grpc.CompressorCallOption:
			if x.CompressorType != "" && x.CompressorType != "identity" {
				return status.Errorf(codes.Internal, "grpc: Compressor is not installed for requested grpc-encoding %q", x.CompressorType)
			}
		case grpc.ContentSubtypeCallOption:
			if x.ContentSubtype != "proto" {
				return status.Errorf(codes.Internal, "no codec registered for content-subtype %s", x.ContentSubtype)
			}
		case grpc.ForceCodecCallOption, grpc.ForceCodecV2CallOption, grpc.CustomCodecCallOption:
			return status.Error(codes.Unimplemented, "tripodgrpc: codecs besides proto are not supported")
		}
	}
	return nil
}

var errClientClosed = status.Error(codes.Canceled, "grpc: the client connection is closing")

// Invoke implements [grpc.ClientConnInterface].
func (d *dialed) Invoke(ctx context.Context, method string, request, reply any, opts ...grpc.CallOption) error {
	opts = append(d.defaults[:len(d.defaults):len(d.defaults)], opts...)
	var next func(n int) grpc.UnaryInvoker
	next = func(n int) grpc.UnaryInvoker {
		return func(ctx context.Context, method string, request, reply any, cc *grpc.ClientConn, opts ...grpc.CallOption) error {
			if n == len(d.unary) {
				return d.invoke(ctx, method, request, reply, opts)
			}
			return d.unary[n](ctx, method, request, reply, cc, next(n+1), opts...)
		}
	}
	return next(0)(ctx, method, request, reply, nil, opts...)
}

func (d *dialed) invoke(ctx context.Context, method string, request, reply any, opts []grpc.CallOption) error {
	s, err := d.open(ctx, &grpc.StreamDesc{}, method, opts)
	if err != nil {
		return err
	}
	if err := s.SendMsg(request); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return s.RecvMsg(reply)
}

// NewStream implements [grpc.ClientConnInterface].
func (d *dialed) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	opts = append(d.defaults[:len(d.defaults):len(d.defaults)], opts...)
	var next func(n int) grpc.Streamer
	next = func(n int) grpc.Streamer {
		return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
			opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if n == len(d.stream) {
				return d.open(ctx, desc, method, opts)
			}
			return d.stream[n](ctx, desc, cc, method, next(n+1), opts...)
		}
	}
	return next(0)(ctx, desc, nil, method, opts...)
}

// Close refuses further calls. The host keeps and closes the connections.
func (d *dialed) Close() error {
	if d.closed {
		return errClientClosed
	}
	d.closed = true
	return nil
}

// Target returns HOST:PORT of the server.
func (d *dialed) Target() string { return d.host }
