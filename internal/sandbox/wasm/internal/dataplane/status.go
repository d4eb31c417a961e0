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

// Status is the status of a failed call (google.rpc.Status). It is an error.
type Status struct {
	Code    codes.Code
	Message string
	// Details are google.protobuf.Any messages, encoded.
	Details [][]byte
}

// Errorf returns a Status with a formatted message.
func Errorf(code codes.Code, format string, args ...any) *Status {
	return &Status{Code: code, Message: fmt.Sprintf(format, args...)}
}

func (s *Status) Error() string {
	if s.Message == "" {
		return codeName(s.Code)
	}
	return codeName(s.Code) + ": " + s.Message
}

// codeNames are the names of the codes in grpc/doc/statuscodes.md, by number.
var codeNames = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
	"INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// codeName returns the name of a code, or "CODE_" and its number if gRPC does not define the code.
func codeName(c codes.Code) string {
	if int(c) < len(codeNames) {
		return codeNames[c]
	}
	return "CODE_" + strconv.FormatUint(uint64(c), 10)
}

// statusOf maps an error from Invoke to the client's status; nil means success. It logs errors whose text is not meant
// for clients.
func statusOf(ctx context.Context, err error, logger *slog.Logger, m *Method) *Status {
	if err == nil {
		return nil
	}
	if s, ok := errors.AsType[*Status](err); ok {
		if s.Code == codes.OK { // never turn an error into success
			return &Status{Code: codes.Internal, Message: s.Message, Details: s.Details}
		}
		return s
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(ctx.Err(), context.DeadlineExceeded):
		return Errorf(codes.DeadlineExceeded, "the request's deadline has passed")
	case errors.Is(err, context.Canceled), ctx.Err() != nil:
		return Errorf(codes.Canceled, "the request was cancelled")
	}
	logger.ErrorContext(ctx, "request failed", "procedure", m.Procedure, "err", err)
	return errInternal()
}

func errInternal() *Status { return Errorf(codes.Internal, "internal error; see the node's log") }

// appendTo appends the status to b, encoded as a google.rpc.Status with the fields code (1), message (2) and details
// (3).
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

// percentEncode encodes a grpc-message (PROTOCOL-HTTP2.md). It keeps printable ASCII except '%'.
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
