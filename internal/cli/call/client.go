package call

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"

	"connectrpc.com/connect"
	"github.com/quic-go/quic-go/http3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
)

// Client is a connection to a server.
type Client interface {
	// Open begins a call of a method, whatever its arity. Its errors have the codes of google.golang.org/grpc/status.
	Open(ctx context.Context, m protoreflect.MethodDescriptor, header map[string]string) (Stream, error)
	Close() error
}

// Stream is one call. Receive gives io.EOF at its good end.
type Stream interface {
	Send(proto.Message) error
	CloseSend() error
	Receive() (proto.Message, error)
}

// Options say how a server is reached.
type Options struct {
	HTTP3 bool
	// TLS is nil for clear text, which HTTP/3 has not.
	TLS *tls.Config
}

// Dial makes a client for HOST:PORT. Nothing is sent before the first call.
func Dial(address string, o Options) (Client, error) {
	if o.HTTP3 {
		if o.TLS == nil {
			o.TLS = &tls.Config{}
		}
		transport := &http3.Transport{TLSClientConfig: o.TLS}
		return &overHTTP3{base: "https://" + address, http: &http.Client{Transport: transport}, transport: transport}, nil
	}
	creds := insecure.NewCredentials()
	if o.TLS != nil {
		creds = credentials.NewTLS(o.TLS)
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(creds))
	return &overHTTP2{conn}, err
}

func procedure(m protoreflect.MethodDescriptor) string {
	return fmt.Sprintf("/%s/%s", m.Parent().FullName(), m.Name())
}

// overHTTP2 is grpc-go.
type overHTTP2 struct{ conn *grpc.ClientConn }

func (c *overHTTP2) Close() error { return c.conn.Close() }

func (c *overHTTP2) Open(ctx context.Context, m protoreflect.MethodDescriptor, header map[string]string) (Stream, error) {
	ctx = metadata.NewOutgoingContext(ctx, metadata.New(header))
	desc := &grpc.StreamDesc{ClientStreams: m.IsStreamingClient(), ServerStreams: m.IsStreamingServer()}
	s, err := c.conn.NewStream(ctx, desc, procedure(m))
	return &grpcStream{ClientStream: s, m: m}, err
}

type grpcStream struct {
	grpc.ClientStream
	m    protoreflect.MethodDescriptor
	done bool
}

// Send gives nil also when the server has ended the call: Receive then tells how.
func (s *grpcStream) Send(message proto.Message) error {
	if err := s.SendMsg(message); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

func (s *grpcStream) Receive() (proto.Message, error) {
	if s.done {
		return nil, io.EOF
	}
	reply := dynamicpb.NewMessage(s.m.Output())
	err := s.RecvMsg(reply)
	s.done = err == nil && !s.m.IsStreamingServer() // grpc-go has read the end of such a call with its one reply
	return reply, err
}

// overHTTP3 is connect-go.
type overHTTP3 struct {
	base      string
	http      *http.Client
	transport *http3.Transport
}

func (c *overHTTP3) Close() error { return c.transport.Close() }

func (c *overHTTP3) Open(ctx context.Context, m protoreflect.MethodDescriptor, header map[string]string) (Stream, error) {
	client := connect.NewClient[dynamicpb.Message, dynamicpb.Message](c.http, c.base+procedure(m), connect.WithGRPC(), connect.WithSchema(m),
		connect.WithResponseInitializer(func(_ connect.Spec, message any) error {
			*message.(*dynamicpb.Message) = *dynamicpb.NewMessage(m.Output())
			return nil
		}))
	s := client.CallBidiStream(ctx) // on the wire, all arities are alike
	for key, v := range header {
		s.RequestHeader().Set(key, v)
	}
	return &connectStream{s}, nil
}

type connectStream struct {
	s *connect.BidiStreamForClient[dynamicpb.Message, dynamicpb.Message]
}

func (s *connectStream) Send(message proto.Message) error {
	if err := s.s.Send(message.(*dynamicpb.Message)); !errors.Is(err, io.EOF) {
		return asStatus(err)
	}
	return nil
}

func (s *connectStream) CloseSend() error { return asStatus(s.s.CloseRequest()) }

func (s *connectStream) Receive() (proto.Message, error) {
	reply, err := s.s.Receive()
	return reply, asStatus(err)
}

// asStatus gives an error of connect-go the form that grpc-go's have.
func asStatus(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	failed, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return status.FromContextError(err).Err()
	}
	return status.Error(codes.Code(failed.Code()), failed.Message())
}
