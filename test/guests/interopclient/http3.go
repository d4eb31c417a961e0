package main

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// http3Conn is a grpc.ClientConnInterface over an HTTP client.
type http3Conn struct {
	client *http.Client
	base   string
}

// Invoke implements grpc.ClientConnInterface.
func (c *http3Conn) Invoke(ctx context.Context, method string, request, reply any, opts ...grpc.CallOption) error {
	s, err := c.NewStream(ctx, &grpc.StreamDesc{}, method, opts...)
	if err != nil {
		return err
	}
	if err := s.SendMsg(request); err != nil && err != io.EOF {
		return err
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	return s.RecvMsg(reply)
}

// NewStream implements grpc.ClientConnInterface.
func (c *http3Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string,
	opts ...grpc.CallOption) (grpc.ClientStream, error) {
	body, out := io.Pipe()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+method, body)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/grpc+proto")
	r.Header.Set("Te", "trailers")
	if deadline, ok := ctx.Deadline(); ok {
		r.Header.Set("Grpc-Timeout", strconv.FormatInt(max(time.Until(deadline).Microseconds(), 1), 10)+"u")
	}
	md, _ := metadata.FromOutgoingContext(ctx)
	for key, values := range md {
		for _, v := range values {
			if strings.HasSuffix(key, "-bin") {
				v = base64.RawStdEncoding.EncodeToString([]byte(v))
			}
			r.Header.Add(key, v)
		}
	}
	s := &http3Stream{ctx: ctx, desc: desc, options: opts, out: out, answered: make(chan struct{})}
	go func() {
		defer close(s.answered)
		s.response, s.failure = c.client.Do(r)
		if s.failure != nil {
			out.CloseWithError(s.failure)
		}
	}()
	return s, nil
}

// http3Stream is one call.
type http3Stream struct {
	ctx      context.Context
	desc     *grpc.StreamDesc
	options  []grpc.CallOption
	out      *io.PipeWriter
	answered chan struct{}
	response *http.Response // valid once answered
	failure  error
	ended    error // the end of the call, once known; io.EOF is OK
}

// answer waits for the response.
func (s *http3Stream) answer() (*http.Response, error) {
	<-s.answered
	return s.response, s.failure
}

func (s *http3Stream) Context() context.Context { return s.ctx }
func (s *http3Stream) CloseSend() error         { return s.out.Close() }
func (s *http3Stream) Trailer() metadata.MD {
	if resp, err := s.answer(); err == nil {
		return decode(resp.Trailer)
	}
	return nil
}

// Header implements grpc.ClientStream.
func (s *http3Stream) Header() (metadata.MD, error) {
	resp, err := s.answer()
	if err != nil {
		return nil, s.failed(err)
	}
	return decode(resp.Header), nil
}

// SendMsg implements grpc.ClientStream.
func (s *http3Stream) SendMsg(m any) error {
	b, err := proto.Marshal(m.(proto.Message))
	if err != nil {
		return err
	}
	if _, err := s.out.Write(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)); err != nil {
		return io.EOF // RecvMsg knows the status
	}
	return nil
}

// RecvMsg implements grpc.ClientStream.
func (s *http3Stream) RecvMsg(m any) error {
	if s.ended != nil {
		return s.ended
	}
	err := s.receive(m)
	if err == nil && !s.desc.ServerStreams { // grpc-go returns a single response together with the status
		if err = s.receive(nil); err == io.EOF {
			err = nil
		}
	}
	if err != nil {
		s.ended = err
	}
	return err
}

// receive receives a message, or the end if m is nil.
func (s *http3Stream) receive(m any) error {
	resp, err := s.answer()
	if err != nil {
		return s.failed(err)
	}
	var prefix [5]byte
	if _, err := io.ReadFull(resp.Body, prefix[:]); err == io.EOF {
		return s.end(resp)
	} else if err != nil {
		return s.failed(err)
	}
	if m == nil || prefix[0] != 0 {
		return status.Errorf(codes.Internal, "a message with the flags %d that nobody asked for", prefix[0])
	}
	b := make([]byte, binary.BigEndian.Uint32(prefix[1:]))
	if _, err := io.ReadFull(resp.Body, b); err != nil {
		return s.failed(err)
	}
	return proto.Unmarshal(b, m.(proto.Message))
}

// end returns the status of a call whose response has ended. It fills the variables of the call options.
func (s *http3Stream) end(resp *http.Response) error {
	from := resp.Trailer
	if len(from.Get("Grpc-Status")) == 0 {
		from = resp.Header
	}
	for _, o := range s.options {
		switch o := o.(type) {
		case grpc.HeaderCallOption:
			*o.HeaderAddr = decode(resp.Header)
		case grpc.TrailerCallOption:
			*o.TrailerAddr = decode(resp.Trailer)
		}
	}
	code, err := strconv.ParseUint(from.Get("Grpc-Status"), 10, 32)
	if err != nil {
		return status.Errorf(codes.Internal, "HTTP status %s with the grpc-status %q", resp.Status, from.Get("Grpc-Status"))
	}
	if code == 0 {
		return io.EOF
	}
	message, err := url.PathUnescape(from.Get("Grpc-Message"))
	if err != nil {
		return err
	}
	st := &spb.Status{Code: int32(code), Message: message}
	if details := from.Get("Grpc-Status-Details-Bin"); details != "" {
		b, err := base64.RawStdEncoding.DecodeString(details)
		if err := errors.Join(err, proto.Unmarshal(b, st)); err != nil {
			return fmt.Errorf("grpc-status-details-bin: %w", err)
		}
	}
	return status.ErrorProto(st)
}

// failed converts an error of the transport.
func (s *http3Stream) failed(err error) error {
	if s.ctx.Err() != nil {
		return status.FromContextError(s.ctx.Err()).Err()
	}
	return status.Error(codes.Unavailable, err.Error())
}

func decode(h http.Header) metadata.MD {
	md := metadata.MD{}
	for name, values := range h {
		key := strings.ToLower(name)
		for _, v := range values {
			if b, err := base64.RawStdEncoding.DecodeString(v); strings.HasSuffix(key, "-bin") && err == nil {
				v = string(b)
			}
			md.Append(key, v)
		}
	}
	return md
}
