package dataplane

import (
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

// grpcCall is a Call with gRPC framing. Each message follows a prefix, which has one byte of flags and four bytes of
// length (PROTOCOL-HTTP2.md, "Length-Prefixed-Message").
type grpcCall struct {
	request *http.Request
	writer  http.ResponseWriter
	trailer http.Header
	stats   *methodMetrics
	max     int // maximum size of a client message, in bytes

	clientStreams, serverStreams bool
	compressedIn, compressOut    bool

	in       *buffer // the last message that Receive returned
	out      *buffer // the message being sent, with its prefix
	received bool
	sent     bool // the response header has been sent
	answered bool // a message has been sent
}

const (
	prefixSize     = 5
	flagCompressed = 1
	// compressMin is the minimum size, in bytes, of messages that are compressed.
	compressMin = 1024
	// copyMax is the maximum size, in bytes, of messages that are copied behind their prefix, so that one Write sends
	// both.
	copyMax = 32 << 10
)

func (c *grpcCall) RequestHeader() http.Header   { return c.request.Header }
func (c *grpcCall) ResponseHeader() http.Header  { return c.writer.Header() }
func (c *grpcCall) ResponseTrailer() http.Header { return c.trailer }
func (c *grpcCall) Peer() string                 { return c.request.RemoteAddr }

// negotiate selects the compression in both directions. Responses are compressed if the client compresses its requests
// and accepts gzip.
func (c *grpcCall) negotiate() *Status {
	switch encoding := firstValue(c.request.Header, "Grpc-Encoding"); encoding {
	case "", "identity":
	case gzipEncoding:
		c.compressedIn = true
		for _, v := range c.request.Header["Grpc-Accept-Encoding"] {
			c.compressOut = c.compressOut || strings.Contains(v, gzipEncoding)
		}
	default:
		c.writer.Header()["Grpc-Accept-Encoding"] = []string{gzipEncoding}
		return Errorf(codes.Unimplemented, "grpc-encoding %q is not supported; use gzip", encoding)
	}
	if c.compressOut {
		c.writer.Header()["Grpc-Encoding"] = []string{gzipEncoding}
	}
	return nil
}

// Receive implements Call.
func (c *grpcCall) Receive() ([]byte, error) {
	if c.received && !c.clientStreams {
		return nil, io.EOF
	}
	message, err := c.readMessage()
	if err == io.EOF && !c.clientStreams {
		return nil, Errorf(codes.Unimplemented, "the method needs one message, but the request has none")
	}
	if err != nil {
		return nil, err
	}
	c.received = true
	if !c.clientStreams {
		if err := c.expectEnd(); err != nil {
			return nil, err
		}
	}
	c.stats.addReceived(len(message))
	return message, nil
}

// expectEnd waits for the end of the request, and returns an error if another message follows.
func (c *grpcCall) expectEnd() error {
	var b [1]byte
	for {
		n, err := c.request.Body.Read(b[:])
		switch {
		case n > 0:
			return Errorf(codes.Unimplemented, "the method takes only one message, but the request has more")
		case err == io.EOF:
			return nil
		case err != nil:
			return c.readError(err)
		}
	}
}

func (c *grpcCall) readMessage() ([]byte, error) {
	if c.in == nil {
		c.in = getBuffer()
	}
	prefix := c.in.room(prefixSize)
	if _, err := io.ReadFull(c.request.Body, prefix); err == io.EOF {
		return nil, io.EOF
	} else if err != nil {
		return nil, c.readError(err)
	}
	flags, size := prefix[0], binary.BigEndian.Uint32(prefix[1:])
	switch {
	case flags > flagCompressed:
		return nil, Errorf(codes.InvalidArgument, "message prefix: unknown flags 0x%02x", flags)
	case flags == flagCompressed && !c.compressedIn:
		// grpc/doc/compression.md requires this code.
		return nil, Errorf(codes.Internal, "message prefix: the message is compressed, but there is no grpc-encoding")
	case uint64(size) > uint64(c.max):
		return nil, Errorf(codes.ResourceExhausted, "message: %d bytes are over the limit of %d", size, c.max)
	}
	if err := c.in.readFrom(c.request.Body, int(size)); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, c.readError(err)
	}
	if flags == 0 || size == 0 { // some clients set flagCompressed on empty messages
		return c.in.bytes, nil
	}
	return c.decompress()
}

// decompress replaces the message in c.in with the decompressed message, and returns it.
func (c *grpcCall) decompress() ([]byte, error) {
	plain := getBuffer()
	switch err := gunzip(plain, c.in.bytes, c.max); {
	case errors.Is(err, errTooLong):
		plain.free()
		return nil, Errorf(codes.ResourceExhausted, "message: over the limit of %d bytes when decompressed", c.max)
	case err != nil:
		plain.free()
		return nil, Errorf(codes.Internal, "message: gzip: %v", err) // grpc/doc/statuscodes.md
	}
	c.in.free()
	c.in = plain
	return plain.bytes, nil
}

// readError returns the status for a failed read of the request.
func (c *grpcCall) readError(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return Errorf(codes.InvalidArgument, "the request ends in the middle of a message")
	}
	return streamError(err)
}

// streamError returns the status for a failed read or write. Either the deadline has passed or the client has
// disconnected.
func streamError(err error) error {
	if isTimeout(err) {
		return Errorf(codes.DeadlineExceeded, "the request's deadline has passed")
	}
	return Errorf(codes.Canceled, "the client disconnected: %v", err)
}

// isTimeout reports whether err is an I/O timeout of any transport.
func isTimeout(err error) bool {
	timeout, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return ok && timeout.Timeout()
}

// Send implements Call.
func (c *grpcCall) Send(message []byte) error {
	if c.answered && !c.serverStreams {
		return errSecondResponse()
	}
	if c.out == nil {
		c.out = getBuffer()
	}
	c.sent, c.answered = true, true
	if err := c.write(message); err != nil {
		return streamError(err)
	}
	c.stats.addSent(len(message))
	if !c.serverStreams {
		return nil // flushed with the trailer
	}
	if err := http.NewResponseController(c.writer).Flush(); err != nil {
		return streamError(err)
	}
	return nil
}

// SendHeader implements Call.
func (c *grpcCall) SendHeader() error {
	if c.sent {
		return nil
	}
	c.sent = true
	if err := http.NewResponseController(c.writer).Flush(); err != nil {
		return streamError(err)
	}
	return nil
}

// Interrupt implements Call.
func (c *grpcCall) Interrupt() { interrupt(c.writer) }

// interrupt ends the reads of a request.
func interrupt(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now()) // per stream in both HTTP/2 and HTTP/3
}

func errSecondResponse() error {
	return Errorf(codes.Internal, "the method sends one message and has already sent it")
}

func (c *grpcCall) write(message []byte) error {
	flags := byte(0)
	prefix := c.out.room(prefixSize)
	switch {
	case c.compressOut && len(message) >= compressMin:
		flags = flagCompressed
		if err := gzipTo(c.out, message); err != nil {
			return err
		}
		message = nil
	case len(message) <= copyMax:
		c.out.bytes = append(prefix, message...)
		message = nil
	}
	c.out.bytes[0] = flags
	binary.BigEndian.PutUint32(c.out.bytes[1:], uint32(len(c.out.bytes)-prefixSize+len(message)))
	if _, err := c.writer.Write(c.out.bytes); err != nil {
		return err
	}
	if len(message) == 0 {
		return nil
	}
	_, err := c.writer.Write(message)
	return err
}

// finish sends the status and ends the response. The status is in the trailer or, if nothing has been sent yet, in the
// header ("Trailers-Only"). Clients read a Trailers-Only header as the trailer, so a header with metadata is flushed
// first.
func (c *grpcCall) finish(status *Status) {
	header, prefix := c.writer.Header(), ""
	if !c.sent && hasMetadata(header) {
		c.sent = true
		_ = http.NewResponseController(c.writer).Flush() // fails only if the client has disconnected
	}
	if c.sent {
		prefix = http.TrailerPrefix
	}
	for key, values := range c.trailer {
		header[prefix+key] = append(header[prefix+key], values...)
	}
	status.addTo(header, prefix)
	if !c.sent {
		c.writer.WriteHeader(http.StatusOK)
	}
}

func (c *grpcCall) free() {
	c.in.free()
	c.out.free()
}
