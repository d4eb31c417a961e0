package tripodgrpc

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
)

// host is the host's side of one call.
type host interface {
	// receive returns the next request message, or io.EOF after the last one. The message is valid until the next
	// receive. If block is true, receive may block all goroutines.
	receive(block bool) ([]byte, error)
	send(message []byte) error
	sendHeader() error
	setHeader(key, value string)
	setTrailer(key, value string)
}

// serverStream is the [grpc.ServerStream] of one call. It is also the call's [grpc.ServerTransportStream], whose
// methods grpc.SetHeader, grpc.SendHeader and grpc.SetTrailer call.
type serverStream struct {
	ctx       context.Context
	procedure string
	host      host
	options   *options
	blocking  bool // receiving may block all goroutines, because the client sends only one message
	sent      bool // the header has been sent
	closed    bool // the call has ended; a goroutine of its handler can still have the stream
}

func newStream(ctx context.Context, procedure string, h host, o *options) *serverStream {
	s := &serverStream{procedure: procedure, host: h, options: o}
	s.ctx = grpc.NewContextWithServerTransportStream(ctx, transportStream{s})
	return s
}

func (s *serverStream) close() { s.closed = true }

var errClosed = status.Error(codes.Canceled, "the call has ended")

// Errors of grpc-go for the same mistakes.
var (
	errHeaderSent = status.Error(codes.Internal, "transport: SendHeader called multiple times")
	errLateHeader = errors.New("transport: the stream is done or WriteHeader was already called")
)

// Context implements grpc.ServerStream.
func (s *serverStream) Context() context.Context { return s.ctx }

// SetHeader implements grpc.ServerStream.
func (s *serverStream) SetHeader(md metadata.MD) error {
	switch {
	case len(md) == 0:
		return nil
	case s.closed, s.sent:
		return errLateHeader
	}
	return s.set(md, s.host.setHeader)
}

// SendHeader implements grpc.ServerStream.
func (s *serverStream) SendHeader(md metadata.MD) error {
	switch {
	case s.closed:
		return errClosed
	case s.sent:
		return errHeaderSent
	}
	if err := s.set(md, s.host.setHeader); err != nil {
		return err
	}
	s.sent = true
	return s.host.sendHeader()
}

// SetTrailer implements grpc.ServerStream. Like grpc-go, it has no way to report invalid metadata, and drops it.
func (s *serverStream) SetTrailer(md metadata.MD) {
	if !s.closed {
		_ = s.set(md, s.host.setTrailer)
	}
}

// set validates metadata before any of it is set, because the host ends a guest that sets invalid metadata.
func (s *serverStream) set(md metadata.MD, set func(key, value string)) error {
	for key, values := range md {
		if err := checkMetadata(strings.ToLower(key), values); err != nil {
			return status.Error(codes.Internal, err.Error())
		}
	}
	for key, values := range md {
		for _, v := range values {
			if key := strings.ToLower(key); !reserved(key) {
				set(key, v)
			}
		}
	}
	return nil
}

// reserved reports whether a key belongs to the protocol. Like grpc-go, such metadata is dropped.
func reserved(key string) bool {
	switch key {
	case "content-type", "user-agent", "te", "connection", "content-length", "transfer-encoding", "trailer", "date", "host", "upgrade",
		"keep-alive",
		"proxy-connection", "content-encoding", "accept-encoding", "alt-svc", "http2-settings":
		return true
	}
	return strings.HasPrefix(key, "grpc-") || strings.HasPrefix(key, "connect-") || strings.HasPrefix(key, ":")
}

// checkMetadata checks an entry (PROTOCOL-HTTP2.md, "Custom-Metadata").
func checkMetadata(key string, values []string) error {
	if key == "" {
		return errors.New("there is an empty key in the metadata")
	}
	for i := range len(key) {
		switch c := key[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '.', c == '-', c == '_', c == ':' && i == 0:
		default:
			return fmt.Errorf("metadata key %q contains illegal characters not in [0-9a-z-_.]", key)
		}
	}
	if strings.HasSuffix(key, "-bin") {
		return nil
	}
	for _, v := range values {
		for i := range len(v) {
			if v[i] < ' ' || v[i] > '~' {
				return fmt.Errorf("metadata key %q contains value with non-printable ASCII characters", key)
			}
		}
	}
	return nil
}

// SendMsg implements grpc.ServerStream.
func (s *serverStream) SendMsg(m any) error {
	message, err := messageOf(m)
	if err != nil {
		return status.Errorf(codes.Internal, "grpc: error while marshaling: %v", err)
	}
	b, err := proto.Marshal(message)
	switch {
	case err != nil:
		return status.Errorf(codes.Internal, "grpc: error while marshaling: %v", err)
	case len(b) > s.options.maxSend:
		return status.Errorf(codes.ResourceExhausted, "grpc: trying to send message larger than max (%d vs. %d)", len(b), s.options.maxSend)
	case s.closed:
		return errClosed
	}
	s.sent = true
	return s.host.send(b)
}

// RecvMsg implements grpc.ServerStream.
func (s *serverStream) RecvMsg(m any) error { return s.receiveMessage(m, s.blocking) }

func (s *serverStream) receiveMessage(m any, block bool) error {
	message, err := messageOf(m)
	if err != nil {
		return status.Errorf(codes.Internal, "grpc: failed to unmarshal the received message: %v", err)
	}
	if s.closed {
		return errClosed
	}
	b, err := s.host.receive(block)
	switch {
	case err != nil:
		return err
	case len(b) > s.options.maxReceive:
		return status.Errorf(codes.ResourceExhausted, "grpc: received message larger than max (%d vs. %d)", len(b), s.options.maxReceive)
	}
	if err := proto.Unmarshal(b, message); err != nil {
		return status.Errorf(codes.Internal, "grpc: failed to unmarshal the received message: %v", err)
	}
	return nil
}

func messageOf(m any) (proto.Message, error) {
	switch m := m.(type) {
	case proto.Message:
		return m, nil
	case protoadapt.MessageV1:
		return protoadapt.MessageV2Of(m), nil
	}
	return nil, fmt.Errorf("%T is not a protobuf message", m)
}

// transportStream is the stream as grpc.ServerTransportStream, whose SetTrailer has another type.
type transportStream struct{ s *serverStream }

func (t transportStream) Method() string                  { return t.s.procedure }
func (t transportStream) SetHeader(md metadata.MD) error  { return t.s.SetHeader(md) }
func (t transportStream) SendHeader(md metadata.MD) error { return t.s.SendHeader(md) }
func (t transportStream) SetTrailer(md metadata.MD) error {
	t.s.SetTrailer(md)
	return nil
}

var _ grpc.ServerStream = (*serverStream)(nil)
