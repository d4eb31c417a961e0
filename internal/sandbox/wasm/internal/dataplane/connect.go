package dataplane

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"github.com/klauspost/compress/gzip"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/anypb"
)

// newGRPCOverConnect returns the handler that serves one method over gRPC-Web and gRPC with JSON.
func (h *grpcHandler) newGRPCOverConnect(e *endpoint) http.Handler {
	return h.newConnect(e, connect.WithCompression(gzipEncoding,
		func() connect.Decompressor { return new(grpcGunzip) }, func() connect.Compressor { return gzip.NewWriter(io.Discard) }))
}

// newConnect returns the handler that serves one method over Connect, or over other protocols with more options.
func (h *grpcHandler) newConnect(e *endpoint, more ...connect.HandlerOption) http.Handler {
	json := jsonCodec{input: e.Desc.Input(), output: e.Desc.Output(), types: h.types()}
	options := []connect.HandlerOption{
		connect.WithCodec(binaryCodec{}),
		connect.WithCodec(json),
		connect.WithCodec(jsonUTF8Codec{json}), // instead of connect-go's own; GET requests can name it
		connect.WithReadMaxBytes(h.MaxMessageBytes),
		connect.WithCompressMinBytes(compressMin),
		connect.WithIdempotency(idempotency(e.Desc)), // GET is allowed for methods without side effects
	}
	options = append(options, more...)
	switch {
	case e.Desc.IsStreamingClient() && e.Desc.IsStreamingServer():
		return connect.NewBidiStreamHandler(e.Procedure, func(ctx context.Context, s *connect.BidiStream[frame, frame]) error {
			c := &connectCall{
				request: s.RequestHeader(), header: s.ResponseHeader(), trailer: s.ResponseTrailer(), peer: s.Peer(),
				receive: s.Receive, send: s.Send, stats: e.stats, streams: true,
			}
			return h.runConnect(ctx, e, c)
		}, options...)
	case e.Desc.IsStreamingClient():
		return connect.NewClientStreamHandler(e.Procedure,
			func(ctx context.Context, s *connect.ClientStream[frame]) (*connect.Response[frame], error) {
				c := &connectCall{request: s.RequestHeader(), peer: s.Peer(), stats: e.stats}
				c.receive = func() (*frame, error) { return receiveFrom(s) }
				return h.runConnectOne(ctx, e, c)
			}, options...)
	case e.Desc.IsStreamingServer():
		return connect.NewServerStreamHandler(e.Procedure,
			func(ctx context.Context, r *connect.Request[frame], s *connect.ServerStream[frame]) error {
				c := &connectCall{
					request: r.Header(), header: s.ResponseHeader(), trailer: s.ResponseTrailer(), peer: r.Peer(),
					receive: once(r.Msg), send: s.Send, stats: e.stats, streams: true,
				}
				return h.runConnect(ctx, e, c)
			}, options...)
	default:
		return connect.NewUnaryHandler(e.Procedure, func(ctx context.Context, r *connect.Request[frame]) (*connect.Response[frame], error) {
			c := &connectCall{request: r.Header(), peer: r.Peer(), receive: once(r.Msg), stats: e.stats}
			response, err := h.runConnectOne(ctx, e, c)
			if r.HTTPMethod() != http.MethodGet {
				return response, err
			}
			if err == nil && isCurrent(r.Header(), c.header) {
				return nil, connect.NewNotModifiedError(nil) // c.header is sent as well
			}
			if err != nil { // what the component says of its response does not hold for an error
				c.header.Del("Etag")
				c.header.Set("Cache-Control", "no-store")
			}
			return response, err
		}, options...)
	}
}

// isCurrent reports whether the client of a GET request already has the response, by its entity tag (RFC 9110, 13.1.2).
func isCurrent(request, response http.Header) bool {
	tag := strings.TrimPrefix(response.Get("Etag"), "W/")
	if tag == "" {
		return false
	}
	for known := range strings.SplitSeq(strings.Join(request.Values("If-None-Match"), ","), ",") {
		if known = strings.TrimSpace(known); known == "*" || strings.TrimPrefix(known, "W/") == tag {
			return true
		}
	}
	return false
}

// serveConnect serves a request over gRPC-Web or Connect, or a request over gRPC that is not in protobuf's binary
// encoding. connect-go gets the media type alone: it knows one of the parameters, and refuses others. It answers 415 to
// codecs that it does not know.
func (h *grpcHandler) serveConnect(w http.ResponseWriter, r *http.Request, media string, next http.Handler) {
	if media != "" {
		r.Header["Content-Type"] = []string{media}
	}
	if r.Method == http.MethodHead { // like GET; the server does not send the body
		r = r.WithContext(r.Context()) // a copy
		r.Method = http.MethodGet
	}
	if err := checkQuery(r); err != nil {
		_ = connect.NewErrorWriter().Write(w, r, err) // the client is gone if this fails
		return
	}
	w, half, done := HalfDuplex(w, r, Ahead{Bytes: h.MaxMessageBytes, Wait: h.ReceiveTimeout, Memory: h.Ahead})
	defer done()
	if half != r {
		half.ProtoMajor = 2 // connect-go refuses streams in both directions over HTTP/1.1
	}
	next.ServeHTTP(w, half.WithContext(context.WithValue(half.Context(), writerKey{}, w)))
}

// checkQuery checks the base64 of a GET request's message, because connect-go takes a mistake in it for one of the
// server.
func checkQuery(r *http.Request) error {
	if r.Method != http.MethodGet {
		return nil
	}
	query := r.URL.Query()
	if query.Get("base64") != "1" {
		return nil
	}
	if _, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(query.Get("message"), "=")); err != nil {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("query parameter message: %w", err))
	}
	return nil
}

// idempotency converts a method's idempotency_level option.
func idempotency(m protoreflect.MethodDescriptor) connect.IdempotencyLevel {
	options, _ := m.Options().(*descriptorpb.MethodOptions)
	switch options.GetIdempotencyLevel() {
	case descriptorpb.MethodOptions_NO_SIDE_EFFECTS:
		return connect.IdempotencyNoSideEffects
	case descriptorpb.MethodOptions_IDEMPOTENT:
		return connect.IdempotencyIdempotent
	}
	return connect.IdempotencyUnknown
}

// runConnect runs a call that streams its responses.
func (h *grpcHandler) runConnect(ctx context.Context, e *endpoint, c *connectCall) error {
	if status := h.runStream(ctx, e, c); status != nil {
		return status.connectError()
	}
	return nil
}

// runStream runs a call, and ends its reads and writes with its deadline. Afterwards, nobody reads the request.
func (h *grpcHandler) runStream(ctx context.Context, e *endpoint, c *connectCall) *Status {
	c.writer = ctx.Value(writerKey{}).(http.ResponseWriter)
	if half, ok := c.writer.(*halfDuplexWriter); ok {
		defer half.body.Close()
	}
	if e.Desc.IsStreamingClient() || e.Desc.IsStreamingServer() {
		defer unblockAtEnd(ctx, c.writer)()
	}
	return h.run(ctx, e, c, c.peer.Protocol)
}

// runConnectOne runs a call that has one response. It sets metadata through connect-go's CallInfo, which keeps header
// and trailer separate even if there is no response.
func (h *grpcHandler) runConnectOne(ctx context.Context, e *endpoint, c *connectCall) (*connect.Response[frame], error) {
	info, _ := connect.CallInfoForHandlerContext(ctx)
	c.header, c.trailer = info.ResponseHeader(), info.ResponseTrailer()
	var response *frame
	c.send = func(f *frame) error {
		if response != nil {
			return errSecondResponse()
		}
		response = &frame{bytes: append([]byte(nil), f.bytes...)}
		return nil
	}
	if status := h.runStream(ctx, e, c); status != nil {
		return nil, status.connectError()
	}
	if response == nil {
		return nil, h.noResponse(ctx, e).connectError()
	}
	return connect.NewResponse(response), nil
}

// connectCall is a Call over a connect-go stream.
type connectCall struct {
	request, header, trailer http.Header
	peer                     connect.Peer
	receive                  func() (*frame, error)
	send                     func(*frame) error
	stats                    *methodMetrics
	streams                  bool // send(nil) sends the header
	sent                     bool
	writer                   http.ResponseWriter
}

// writerKey is the key of a request's http.ResponseWriter in its context, which connect-go does not pass to handlers.
type writerKey struct{}

func (c *connectCall) RequestHeader() http.Header   { return c.request }
func (c *connectCall) ResponseHeader() http.Header  { return c.header }
func (c *connectCall) ResponseTrailer() http.Header { return c.trailer }
func (c *connectCall) Peer() string                 { return c.peer.Addr }

func (c *connectCall) Receive() ([]byte, error) {
	f, err := c.receive()
	if errors.Is(err, io.EOF) {
		return nil, io.EOF
	}
	if err != nil {
		return nil, fromConnect(err)
	}
	c.stats.addReceived(len(f.bytes))
	return f.bytes, nil
}

// SendHeader implements Call. Methods with one response send the header with the response.
func (c *connectCall) SendHeader() error {
	if !c.streams || c.sent {
		return nil
	}
	c.sent = true
	if err := c.send(nil); err != nil {
		return fromConnect(err)
	}
	return nil
}

// Interrupt implements Call.
func (c *connectCall) Interrupt() { interrupt(c.writer) }

func (c *connectCall) Send(message []byte) error {
	c.sent = true
	if err := c.send(&frame{bytes: message}); err != nil {
		return fromConnect(err)
	}
	c.stats.addSent(len(message))
	return nil
}

// once returns a function that returns f once and then io.EOF.
func once(f *frame) func() (*frame, error) {
	return func() (*frame, error) {
		if f == nil {
			return nil, io.EOF
		}
		defer func() { f = nil }()
		return f, nil
	}
}

func receiveFrom(s *connect.ClientStream[frame]) (*frame, error) {
	if s.Receive() {
		return s.Msg(), nil
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	return nil, io.EOF
}

// connectError converts the status to connect-go's error.
func (s *Status) connectError() *connect.Error {
	err := connect.NewError(connect.Code(s.Code), errors.New(s.Message))
	for _, d := range s.Details {
		packed := &anypb.Any{}
		if proto.Unmarshal(d, packed) != nil {
			continue // not an Any; only gRPC framing can transmit such a detail
		}
		if detail, e := connect.NewErrorDetail(packed); e == nil {
			err.AddDetail(detail)
		}
	}
	return err
}

// fromConnect converts connect-go's error for a broken stream to a Status.
func fromConnect(err error) error {
	if isTimeout(err) {
		return streamError(err)
	}
	if ce, ok := errors.AsType[*connect.Error](err); ok {
		return &Status{Code: codes.Code(ce.Code()), Message: ce.Message()}
	}
	return err
}

// frame is a message in protobuf's binary encoding.
type frame struct{ bytes []byte }

// binaryCodec copies messages, which are already in the binary encoding.
type binaryCodec struct{}

func (binaryCodec) Name() string { return "proto" }

// Marshal returns a new slice, because connect-go puts the slice into its own buffer pool.
func (c binaryCodec) Marshal(m any) ([]byte, error) { return c.MarshalAppend(nil, m) }

// MarshalAppend appends to a buffer from connect-go's pool. connect-go prefers MarshalAppend to Marshal.
func (binaryCodec) MarshalAppend(to []byte, m any) ([]byte, error) {
	if f, ok := m.(*frame); ok {
		return append(to, f.bytes...), nil
	}
	return proto.MarshalOptions{}.MarshalAppend(to, m.(proto.Message)) // connect-go's own messages
}

func (binaryCodec) Unmarshal(b []byte, m any) error {
	f := m.(*frame)
	f.bytes = append(f.bytes[:0], b...) // connect-go reuses b
	return nil
}

// jsonCodec converts one method's messages from and to protobuf's JSON format.
type jsonCodec struct {
	input, output protoreflect.MessageDescriptor
	types         *dynamicpb.Types
}

func (jsonCodec) Name() string { return "json" }

// jsonUTF8Codec is jsonCodec under the other name that connect-go has for JSON.
type jsonUTF8Codec struct{ jsonCodec }

func (jsonUTF8Codec) Name() string { return "json; charset=utf-8" }

func (c jsonCodec) Marshal(m any) ([]byte, error) {
	f, ok := m.(*frame)
	if !ok {
		return protojson.Marshal(m.(proto.Message))
	}
	message := dynamicpb.NewMessage(c.output)
	if err := (proto.UnmarshalOptions{Resolver: c.types}).Unmarshal(f.bytes, message); err != nil {
		return nil, fmt.Errorf("response: %w", err)
	}
	return protojson.MarshalOptions{Resolver: c.types}.Marshal(message)
}

func (c jsonCodec) Unmarshal(b []byte, m any) error {
	message := dynamicpb.NewMessage(c.input)
	if err := (protojson.UnmarshalOptions{Resolver: c.types, DiscardUnknown: true}).Unmarshal(b, message); err != nil {
		// protojson randomly uses non-breaking spaces in errors, to discourage parsing.
		return errors.New(strings.ReplaceAll(err.Error(), "\u00a0", " "))
	}
	binary, err := proto.Marshal(message)
	if err != nil {
		return err
	}
	m.(*frame).bytes = binary
	return nil
}
