package grpcclient

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http2"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

const contentType = "application/grpc"

// httpCodes maps HTTP statuses of servers that are not gRPC servers (grpc/doc/http-grpc-status-mapping.md).
var httpCodes = map[int]codes.Code{
	http.StatusBadRequest: codes.Internal, http.StatusUnauthorized: codes.Unauthenticated, http.StatusForbidden: codes.PermissionDenied,
	http.StatusNotFound: codes.Unimplemented, http.StatusTooManyRequests: codes.Unavailable, http.StatusBadGateway: codes.Unavailable,
	http.StatusServiceUnavailable: codes.Unavailable, http.StatusGatewayTimeout: codes.Unavailable,
}

// checkResponse returns the status of a response that is not from a gRPC server, or nil.
func checkResponse(r *http.Response) *dataplane.Status {
	if r.ProtoMajor < 2 {
		return dataplane.Errorf(codes.Unavailable, "the server does not speak HTTP/2")
	}
	if r.StatusCode != http.StatusOK {
		if st, ok := statusIn(r.Header); ok && st != nil {
			return st
		}
		code, known := httpCodes[r.StatusCode]
		if !known {
			code = codes.Unknown
		}
		return dataplane.Errorf(code, "unexpected HTTP status code received from server: %d (%s)", r.StatusCode, http.StatusText(r.StatusCode))
	}
	if got := dataplane.MediaType(r.Header); got != contentType && !strings.HasPrefix(got, contentType+"+") {
		return dataplane.Errorf(codes.Unknown, "the server answered with the content-type %.100q, which is not gRPC's", got)
	}
	if encoding := r.Header.Get("Grpc-Encoding"); encoding != "" && encoding != "identity" {
		return dataplane.Errorf(codes.Internal, "the server uses the encoding %.100q, which the request did not accept", encoding)
	}
	return nil
}

// statusIn returns the status in a trailer, which is nil for OK. It returns false if there is none.
func statusIn(trailer http.Header) (*dataplane.Status, bool) {
	text := trailer.Get("Grpc-Status")
	if text == "" {
		return nil, false
	}
	code, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return dataplane.Errorf(codes.Internal, "the server sent the malformed grpc-status %.20q", text), true
	}
	if code == uint64(codes.OK) {
		return nil, true
	}
	message := trailer.Get("Grpc-Message")
	if decoded, err := url.PathUnescape(message); err == nil { // if it is malformed, it is shown as it is
		message = decoded
	}
	st := &dataplane.Status{Code: codes.Code(code), Message: strings.ToValidUTF8(message, "\uFFFD")}
	encoded, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(trailer.Get("Grpc-Status-Details-Bin"), "="))
	var full spb.Status
	if err != nil || len(encoded) == 0 || proto.Unmarshal(encoded, &full) != nil || uint64(uint32(full.GetCode())) != code {
		return st, true
	}
	for _, d := range full.GetDetails() {
		if b, err := proto.Marshal(d); err == nil {
			st.Details = append(st.Details, b)
		}
	}
	return st, true
}

// streamCodes maps the codes of RST_STREAM (PROTOCOL-HTTP2.md, "Errors"). Others are Internal.
var streamCodes = map[http2.ErrCode]codes.Code{
	http2.ErrCodeRefusedStream: codes.Unavailable, http2.ErrCodeCancel: codes.Canceled, http2.ErrCodeStreamClosed: codes.Unknown,
	http2.ErrCodeEnhanceYourCalm: codes.ResourceExhausted, http2.ErrCodeInadequateSecurity: codes.PermissionDenied,
}

// failures maps the error-codes of requests that did not reach a server, or got no response. Others are Unavailable.
var failures = map[string]codes.Code{
	"HTTP-request-denied": codes.PermissionDenied, "destination-IP-prohibited": codes.PermissionDenied,
	"HTTP-request-URI-invalid": codes.InvalidArgument, "connection-limit-reached": codes.ResourceExhausted,
	"HTTP-response-header-section-size": codes.ResourceExhausted, "HTTP-protocol-error": codes.Internal,
}

// statusOf returns the status for an error of the transport or of the response's body.
func (c *Call) statusOf(err error) *dataplane.Status {
	if st, ok := errors.AsType[*dataplane.Status](err); ok {
		return st
	}
	cause := context.Cause(c.ctx)
	if st, ok := errors.AsType[*dataplane.Status](cause); ok {
		return st
	}
	var reset http2.StreamError
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(cause, context.DeadlineExceeded):
		return dataplane.Errorf(codes.DeadlineExceeded, "context deadline exceeded")
	case errors.Is(err, context.Canceled), cause != nil:
		return dataplane.Errorf(codes.Canceled, "context canceled")
	case errors.As(err, &reset):
		code, known := streamCodes[reset.Code]
		if !known {
			code = codes.Internal
		}
		return dataplane.Errorf(code, "stream terminated by RST_STREAM with error code: %v", reset.Code)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return dataplane.Errorf(codes.Unavailable, "the connection ended within the response")
	}
	failure := wasihttp.CodeOf(err)
	code, known := failures[failure.Code]
	if !known {
		code = codes.Unavailable
	}
	if code == codes.PermissionDenied {
		return dataplane.Errorf(code, "%s: the pod may not connect to it (annotation egress)", c.target)
	}
	return dataplane.Errorf(code, "%s: %s", c.target, strings.TrimSpace(failure.Code+" "+failure.Message))
}
