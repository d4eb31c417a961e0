package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
)

// Status is how a call ended when it ended badly (google.rpc.Status). It is an error.
type Status struct {
	Code    codes.Code
	Message string
	// Details are google.protobuf.Any messages, encoded.
	Details [][]byte
}

// Errorf makes a status.
func Errorf(code codes.Code, format string, args ...any) *Status {
	return &Status{Code: code, Message: fmt.Sprintf(format, args...)}
}

func (s *Status) Error() string {
	if s.Message == "" {
		return codeName(s.Code)
	}
	return codeName(s.Code) + ": " + s.Message
}

// codeNames are the names of grpc/doc/statuscodes.md by number.
var codeNames = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
	"INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// codeName names any code; those past the list are not gRPC's and are told by number.
func codeName(c codes.Code) string {
	if int(c) < len(codeNames) {
		return codeNames[c]
	}
	return "CODE_" + strconv.FormatUint(uint64(c), 10)
}

// statusOf finds what to tell the client of what Invoke returned; nil is success. The text of an error that was not
// made for clients goes to the log.
func statusOf(ctx context.Context, err error, logger *slog.Logger, m *Method) *Status {
	if err == nil {
		return nil
	}
	if s, ok := errors.AsType[*Status](err); ok {
		if s.Code == codes.OK { // an error is an error
			return &Status{Code: codes.Internal, Message: s.Message, Details: s.Details}
		}
		return s
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(ctx.Err(), context.DeadlineExceeded):
		return Errorf(codes.DeadlineExceeded, "the deadline of the request has passed")
	case errors.Is(err, context.Canceled), ctx.Err() != nil:
		return Errorf(codes.Canceled, "the request was cancelled")
	}
	logger.ErrorContext(ctx, "request failed", "procedure", m.Procedure, "err", err)
	return Errorf(codes.Internal, "internal error, see the log of the node")
}

// appendTo encodes the status as google.rpc.Status: code = 1, message = 2, details = 3.
func (s *Status) appendTo(b []byte) []byte {
	b = protowire.AppendTag(b, 1, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(s.Code))
	if s.Message != "" {
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		b = protowire.AppendString(b, s.Message)
	}
	for _, d := range s.Details {
		b = protowire.AppendTag(b, 3, protowire.BytesType)
		b = protowire.AppendBytes(b, d)
	}
	return b
}

// percentEncode encodes a grpc-message (PROTOCOL-HTTP2.md): printable ASCII but '%' stays.
func percentEncode(s string) string {
	const hex = "0123456789ABCDEF"
	plain := func(c byte) bool { return c >= ' ' && c <= '~' && c != '%' }
	n := 0
	for i := range len(s) {
		if !plain(s[i]) {
			n++
		}
	}
	if n == 0 {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 2*n)
	for i := range len(s) {
		if c := s[i]; plain(c) {
			b.WriteByte(c)
		} else {
			b.Write([]byte{'%', hex[c>>4], hex[c&15]})
		}
	}
	return b.String()
}
