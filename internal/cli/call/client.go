package call

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

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
	// Open starts a call of a method, whether unary or streaming. Its errors carry codes of
	// google.golang.org/grpc/status.
	Open(ctx context.Context, m protoreflect.MethodDescriptor, header map[string]string) (Stream, error)
	Close() error
}

// Stream is one call. Receive returns io.EOF at the end of a successful call.
type Stream interface {
	Send(proto.Message) error
	CloseSend() error
	Receive() (proto.Message, error)
	// Header returns the response's header, and waits for it. Trailer returns the trailer once Receive has returned an
	// error or the only reply.
	Header() (metadata.MD, error)
	Trailer() metadata.MD
}

// Options configures the connection.
type Options struct {
	HTTP3 bool
	// TLS is nil for clear text, which HTTP/3 does not support.
	TLS *tls.Config
}

// Dial makes a client for HOST:PORT. The client connects at the first call.
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

// overHTTP2 uses grpc-go.
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

// Send returns nil even if the server has ended the call; Receive then returns the status.
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
	s.done = err == nil && !s.m.IsStreamingServer() // grpc-go has read the end of the call together with the only reply
	return reply, err
}

// overHTTP3 uses connect-go.
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
	s := client.CallBidiStream(ctx) // unary and streaming calls have the same wire format
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

func (s *connectStream) Header() (metadata.MD, error) { return metadataOf(s.s.ResponseHeader()), nil }

func (s *connectStream) Trailer() metadata.MD { return metadataOf(s.s.ResponseTrailer()) }

// metadataOf converts a header from connect-go, which leaves binary values encoded.
func metadataOf(h http.Header) metadata.MD {
	md := metadata.MD{}
	for key, values := range h {
		for _, v := range values {
			if raw, err := connect.DecodeBinaryHeader(v); err == nil && strings.HasSuffix(strings.ToLower(key), "-bin") {
				v = string(raw)
			}
			md.Append(key, v)
		}
	}
	return md
}

// asStatus converts an error from connect-go to a gRPC status error.
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
