package tripodgrpc

import (
	"cmp"
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// clientHost is the host's side of one call to another server. One goroutine can receive while another one sends.
type clientHost interface {
	// send waits until the host has taken the message. It returns io.EOF if the server reads no more, and then next says
	// why.
	send(message []byte) error
	finish()
	// next waits for what the server has sent. A message is valid until the following next. At the end it returns the
	// trailer and the status, nil for OK, and is not called again.
	next() (e clientEvent, err error)
	close()
}

// clientEvent is what a server has sent.
type clientEvent struct {
	header  metadata.MD // not nil for the header
	message []byte      // if it is neither the header nor the end
	end     bool
	trailer metadata.MD
	status  *status.Status
}

// clientStream is the [grpc.ClientStream] of one call.
type clientStream struct {
	ctx    context.Context
	cancel context.CancelFunc
	desc   *grpc.StreamDesc
	host   clientHost
	opts   callOptions
	stop   func() bool // ends the watch of ctx

	finished bool // CloseSend was called

	receiving sync.Mutex // guards what follows, except ending
	header    metadata.MD
	trailer   metadata.MD
	message   []byte // received with the header, and not yet returned
	pending   bool   // message is set
	err       error  // how the call ended; io.EOF for OK
	ending    sync.Once
}

// open begins a call.
func (d *dialed) open(ctx context.Context, desc *grpc.StreamDesc, method string, opts []grpc.CallOption) (*clientStream, error) {
	o := callOptions{maxReceive: defaultMaxReceive, maxSend: defaultMaxSend}
	if err := o.apply(opts); err != nil {
		return nil, err
	}
	s, err := d.begin(ctx, desc, method, o)
	if err != nil {
		for _, f := range o.onFinish {
			f(err)
		}
	}
	return s, err
}

func (d *dialed) begin(ctx context.Context, desc *grpc.StreamDesc, method string, o callOptions) (*clientStream, error) {
	switch {
	case d.closed:
		return nil, errClientClosed
	case ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	md, err := d.outgoing(ctx, method, o.credentials)
	if err != nil {
		return nil, err
	}
	r := &clientRequest{
		target: d.target, authority: cmp.Or(o.authority, d.authority), method: method, timeout: -1, metadata: md,
		maxReceive: uint32(max(o.maxReceive, 0)),
	}
	if deadline, ok := ctx.Deadline(); ok {
		r.timeout = max(int64(time.Until(deadline)), 0)
	}
	host, err := d.start(r)
	if err != nil {
		return nil, err
	}
	s := &clientStream{desc: desc, host: host, opts: o}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.stop = context.AfterFunc(s.ctx, host.close)
	return s, nil
}

// outgoing returns the metadata of a call. Like grpc-go, it drops what belongs to the protocol.
func (d *dialed) outgoing(ctx context.Context, method string, creds credentials.PerRPCCredentials) (metadata.MD, error) {
	given, _ := metadata.FromOutgoingContext(ctx)
	md := metadata.MD{}
	for key, values := range given {
		if key = strings.ToLower(key); reserved(key) {
			continue
		}
		if err := checkMetadata(key, values); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		md[key] = append(md[key], values...)
	}
	if d.userAgent != "" {
		md["user-agent"] = []string{d.userAgent}
	}
	if creds == nil {
		return md, nil
	}
	secure := strings.HasPrefix(d.target, "https:")
	if creds.RequireTransportSecurity() && !secure {
		return nil, status.Error(codes.Unauthenticated, "transport: cannot send secure credentials on an insecure connection")
	}
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	more, err := creds.GetRequestMetadata(ctx, "https://"+strings.TrimSuffix(d.host, ":443")+"/"+service)
	if err != nil {
		if _, ok := status.FromError(err); ok {
			return nil, err
		}
		return nil, status.Errorf(codes.Unauthenticated, "transport: per-RPC creds failed due to error: %v", err)
	}
	for key, v := range more {
		key = strings.ToLower(key)
		if err := checkMetadata(key, []string{v}); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		md[key] = append(md[key], v)
	}
	return md, nil
}

// Context implements grpc.ClientStream.
func (s *clientStream) Context() context.Context { return s.ctx }

// Header implements grpc.ClientStream. It waits for the header.
func (s *clientStream) Header() (metadata.MD, error) {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	for s.header == nil && s.err == nil && !s.pending {
		s.pump()
	}
	if s.header == nil && s.err != io.EOF {
		return nil, s.err
	}
	return s.header, nil
}

// Trailer implements grpc.ClientStream.
func (s *clientStream) Trailer() metadata.MD {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	return s.trailer
}

// CloseSend implements grpc.ClientStream.
func (s *clientStream) CloseSend() error {
	if !s.finished {
		s.finished = true
		s.host.finish()
	}
	return nil
}

// SendMsg implements grpc.ClientStream.
func (s *clientStream) SendMsg(m any) error {
	if s.finished {
		return status.Error(codes.Internal, "SendMsg called after CloseSend")
	}
	message, err := messageOf(m)
	var b []byte
	if err == nil {
		b, err = proto.Marshal(message)
	}
	switch {
	case err != nil:
		err = status.Errorf(codes.Internal, "grpc: error while marshaling: %v", err)
	case len(b) > s.opts.maxSend:
		err = status.Errorf(codes.ResourceExhausted, "grpc: trying to send message larger than max (%d vs. %d)", len(b), s.opts.maxSend)
	}
	if err != nil {
		s.receiving.Lock()
		defer s.receiving.Unlock()
		s.end(err, nil)
		return err
	}
	if err := s.host.send(b); err != nil {
		if !s.desc.ClientStreams && errors.Is(err, io.EOF) {
			return nil // RecvMsg returns the status
		}
		return err
	}
	if !s.desc.ClientStreams {
		return s.CloseSend()
	}
	return nil
}

// RecvMsg implements grpc.ClientStream. If the server sends one message, RecvMsg also waits for the status.
func (s *clientStream) RecvMsg(m any) error {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	if err := s.receive(m); err != nil {
		if err == io.EOF && !s.desc.ServerStreams {
			err = status.Error(codes.Internal, "cardinality violation: received no response message from non-server-streaming RPC")
		}
		return err
	}
	if s.desc.ServerStreams {
		return nil
	}
	for s.err == nil && !s.pending {
		s.pump()
	}
	if s.pending {
		s.end(status.Error(codes.Internal, "cardinality violation: expected <EOF> for non server-streaming RPCs, but received another message"),
			nil)
	}
	if s.err == io.EOF {
		return nil
	}
	return s.err
}

// receive receives one message. The caller holds the lock, as for the functions below.
func (s *clientStream) receive(m any) error {
	for s.err == nil && !s.pending {
		s.pump()
	}
	if !s.pending {
		return s.err
	}
	s.pending = false
	message, err := messageOf(m)
	if err == nil {
		err = proto.Unmarshal(s.message, message)
	}
	if err != nil {
		err = status.Errorf(codes.Internal, "grpc: failed to unmarshal the received message: %v", err)
		s.end(err, nil)
	}
	return err
}

// pump waits for an event.
func (s *clientStream) pump() {
	e, err := s.host.next()
	switch {
	case err != nil && s.ctx.Err() != nil:
		s.end(status.FromContextError(s.ctx.Err()).Err(), nil)
	case err != nil:
		s.end(err, nil)
	case e.end && e.status.Code() == codes.OK:
		s.end(io.EOF, e.trailer)
	case e.end:
		s.end(e.status.Err(), e.trailer)
	case e.header != nil:
		s.header = e.header
		for _, addr := range s.opts.header {
			*addr = e.header
		}
	default:
		s.message, s.pending = e.message, true
	}
}

// end ends the call.
func (s *clientStream) end(err error, trailer metadata.MD) {
	s.ending.Do(func() {
		s.err, s.trailer = err, trailer
		for _, addr := range s.opts.trailer {
			*addr = trailer
		}
		s.stop()
		s.cancel()
		s.host.close()
		if err == io.EOF {
			err = nil
		}
		for _, f := range s.opts.onFinish {
			f(err)
		}
	})
}

var _ grpc.ClientStream = (*clientStream)(nil)
