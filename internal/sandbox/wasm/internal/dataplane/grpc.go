package dataplane

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
)

const (
	grpcContentType = "application/grpc"
	gzipEncoding    = "gzip"
)

// MediaType returns the media type of a request or response: its Content-Type in lower case and without parameters (RFC
// 9110, 8.3.1). No protocol that the package serves defines a parameter, and JSON is always UTF-8 (RFC 8259, 8.1).
func MediaType(header http.Header) string {
	media, _, _ := strings.Cut(firstValue(header, "Content-Type"), ";")
	return strings.ToLower(strings.TrimSpace(media))
}

// isGRPC reports whether media is application/grpc, with or without +codec. It returns false for gRPC-Web.
func isGRPC(media string) bool { return isOf(media, grpcContentType) }

// isOf reports whether media is the given type, with or without +codec.
func isOf(media, given string) bool {
	rest, ok := strings.CutPrefix(media, given)
	return ok && (rest == "" || rest[0] == '+')
}

// IsGRPCFamily reports whether media is gRPC or gRPC-Web, so that a response has a gRPC status.
func IsGRPCFamily(media string) bool {
	return isGRPC(media) || isOf(media, webContentType) || isOf(media, webTextContentType)
}

// isProto reports whether media is gRPC with protobuf's binary encoding, the default.
func isProto(media string) bool { return media == grpcContentType || media == grpcContentType+"+proto" }

// serveGRPC serves one gRPC request over HTTP/2 or HTTP/3.
func (h *grpcHandler) serveGRPC(w http.ResponseWriter, r *http.Request, e *endpoint, media string) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "gRPC requests are POST", http.StatusMethodNotAllowed)
		return
	}
	header := w.Header()
	header["Content-Type"] = []string{media}
	header["Date"] = nil // gRPC does not define it (PROTOCOL-HTTP2.md, "Response-Headers"), and omitting it saves time
	c := &grpcCall{
		request: r, writer: w, stats: e.stats, max: h.MaxMessageBytes,
		clientStreams: e.Desc.IsStreamingClient(), serverStreams: e.Desc.IsStreamingServer(),
		trailer: http.Header{},
	}
	defer c.free()
	status := c.negotiate()
	if status == nil {
		status = h.runWithDeadline(r, e, c)
	}
	if status == nil && !c.serverStreams && !c.answered {
		status = h.noResponse(r.Context(), e)
	}
	c.finish(status)
}

// noResponse logs that a method has sent no response, and returns the status.
func (h *grpcHandler) noResponse(ctx context.Context, e *endpoint) *Status {
	h.Logger.ErrorContext(ctx, "method sent no response", "procedure", e.Procedure)
	return Errorf(codes.Internal, "the method sent no response")
}

// runWithDeadline runs the call within the client's timeout and MaxTimeout.
func (h *grpcHandler) runWithDeadline(r *http.Request, e *endpoint, c *grpcCall) *Status {
	timeout, err := parseTimeout(firstValue(r.Header, "Grpc-Timeout"))
	if err != nil {
		return Errorf(codes.InvalidArgument, "%v", err)
	}
	if e.timeout > 0 && (timeout < 0 || timeout > e.timeout) {
		timeout = e.timeout
	}
	if timeout < 0 {
		if !c.clientStreams {
			_ = http.NewResponseController(c.writer).SetReadDeadline(time.Now().Add(h.ReceiveTimeout))
		}
		return h.run(r.Context(), e, c, "grpc")
	}
	timeout = min(timeout, maxTimeout)
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	defer unblockAtEnd(ctx, c.writer)()
	return h.run(ctx, e, c, "grpc")
}

// maxTimeout bounds a client's timeout, so that deadlines stay within the range of time.Time.
const maxTimeout = 10 * 365 * 24 * time.Hour

// statusGrace is how long writes can continue after the deadline, so that the status can be sent.
const statusGrace = 100 * time.Millisecond

// unblockAtEnd unblocks the request's reads and writes when ctx ends. The handler must call stop before it returns,
// because w must not be used afterwards.
func unblockAtEnd(ctx context.Context, w http.ResponseWriter) (stop func()) {
	var mu sync.Mutex
	stopped := false
	cancel := context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		if stopped {
			return
		}
		now := time.Now()
		control := http.NewResponseController(w)
		_ = control.SetReadDeadline(now) // per stream in both HTTP/2 and HTTP/3
		_ = control.SetWriteDeadline(now.Add(statusGrace))
	})
	return func() {
		cancel()
		mu.Lock()
		stopped = true
		mu.Unlock()
	}
}

// parseTimeout parses the value of grpc-timeout: up to eight digits and a unit. It returns -1 for an empty string.
func parseTimeout(s string) (time.Duration, error) {
	if s == "" {
		return -1, nil
	}
	unit := timeoutUnit(s[len(s)-1])
	n, err := strconv.ParseUint(s[:len(s)-1], 10, 64)
	if unit == 0 || err != nil || len(s) > 9 {
		return 0, fmt.Errorf("grpc-timeout %q: want up to 8 digits and one of H M S m u n", s)
	}
	if time.Duration(n) > time.Duration(1<<63-1)/unit {
		return 1<<63 - 1, nil
	}
	return time.Duration(n) * unit, nil
}

func timeoutUnit(c byte) time.Duration {
	switch c {
	case 'H':
		return time.Hour
	case 'M':
		return time.Minute
	case 'S':
		return time.Second
	case 'm':
		return time.Millisecond
	case 'u':
		return time.Microsecond
	case 'n':
		return time.Nanosecond
	}
	return 0
}

// addTo adds the status to a header or trailer. The prefix is http.TrailerPrefix or empty.
func (s *Status) addTo(h http.Header, prefix string) {
	if s == nil {
		h[prefix+"Grpc-Status"] = []string{"0"}
		return
	}
	h[prefix+"Grpc-Status"] = []string{strconv.FormatUint(uint64(s.Code), 10)}
	if s.Message != "" {
		h[prefix+"Grpc-Message"] = []string{percentEncode(s.Message)}
	}
	if len(s.Details) > 0 {
		h[prefix+"Grpc-Status-Details-Bin"] = []string{base64.RawStdEncoding.EncodeToString(s.appendTo(nil))}
	}
}
