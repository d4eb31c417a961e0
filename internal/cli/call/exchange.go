package call

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
)

// Requests parses the messages of a call from JSON. If a method takes one request and there is no text, the request is
// empty.
func Requests(m protoreflect.MethodDescriptor, texts []string) ([]proto.Message, error) {
	if len(texts) == 0 && !m.IsStreamingClient() {
		texts = []string{"{}"}
	}
	if len(texts) > 1 && !m.IsStreamingClient() {
		return nil, fmt.Errorf("%s takes one message, not %d: %w", m.FullName(), len(texts), errdefs.ErrInvalidArgument)
	}
	var all []proto.Message
	for _, text := range texts {
		message := dynamicpb.NewMessage(m.Input())
		if err := protojson.Unmarshal([]byte(text), message); err != nil {
			return nil, fmt.Errorf("%s is not a %s: %w: %w", text, m.Input().FullName(), err, errdefs.ErrInvalidArgument)
		}
		all = append(all, message)
	}
	return all, nil
}

// Metadata is what a server sends besides messages.
type Metadata struct{ Header, Trailer metadata.MD }

// Exchange makes a call: it sends all requests and passes each reply to the given function as it arrives. It returns the
// metadata of a call that has ended with whatever status.
func Exchange(ctx context.Context, c Client, m protoreflect.MethodDescriptor, header map[string]string, requests []proto.Message,
	reply func(proto.Message) error) (md Metadata, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Open(ctx, m, header)
	if err != nil {
		return md, err
	}
	sent := make(chan error, 1)
	go func() { sent <- sendAll(s, requests) }()
	for {
		message, err := s.Receive()
		if err != nil {
			md.Header, _ = s.Header() // a call without one has failed
			md.Trailer = s.Trailer()
		}
		if errors.Is(err, io.EOF) {
			return md, <-sent
		}
		if err != nil {
			return md, err
		}
		if err := reply(message); err != nil {
			return md, err
		}
	}
}

func sendAll(s Stream, requests []proto.Message) error {
	for _, r := range requests {
		if err := s.Send(r); err != nil {
			return err
		}
	}
	return s.CloseSend()
}
