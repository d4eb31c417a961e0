package protowit

import (
	"github.com/tripod-run/tripod/internal/component/wit"
)

// The names of the host package and its interfaces.
const (
	HostPackage       = "tripod:grpc@0.1.0"
	TypesInterface    = "tripod:grpc/types@0.1.0"
	ResponseInterface = "tripod:grpc/response@0.1.0"
)

// The functions of ResponseInterface. Both have the type func(e: entry).
const (
	SetHeader  = "set-header"
	SetTrailer = "set-trailer"
)

var (
	boolType   = &wit.Type{Kind: wit.Bool}
	u8Type     = &wit.Type{Kind: wit.U8}
	s32Type    = &wit.Type{Kind: wit.S32}
	u32Type    = &wit.Type{Kind: wit.U32}
	s64Type    = &wit.Type{Kind: wit.S64}
	u64Type    = &wit.Type{Kind: wit.U64}
	f32Type    = &wit.Type{Kind: wit.F32}
	f64Type    = &wit.Type{Kind: wit.F64}
	stringType = &wit.Type{Kind: wit.String}
	bytesType  = listOf(u8Type)

	// EntryType is tripod:grpc/types.entry.
	EntryType = &wit.Type{Kind: wit.Record, Name: "entry", Fields: []wit.Field{
		{Name: "key", Type: stringType}, {Name: "value", Type: bytesType},
	}}
	// ContextType is tripod:grpc/types.context.
	ContextType = &wit.Type{Kind: wit.Record, Name: "context", Fields: []wit.Field{
		{Name: "method", Type: stringType}, {Name: "peer", Type: stringType},
		{Name: "timeout", Type: optionOf(u64Type)}, {Name: "metadata", Type: listOf(EntryType)},
	}}
	// StatusType is tripod:grpc/types.status.
	StatusType = &wit.Type{Kind: wit.Record, Name: "status", Fields: []wit.Field{
		{Name: "code", Type: u32Type}, {Name: "message", Type: stringType}, {Name: "details", Type: listOf(bytesType)},
	}}
)

func listOf(t *wit.Type) *wit.Type   { return &wit.Type{Kind: wit.List, Elem: t} }
func optionOf(t *wit.Type) *wit.Type { return &wit.Type{Kind: wit.Option, Elem: t} }

// Entry is one metadata value.
type Entry struct {
	Key   string
	Value []byte
}

// Context describes a call to the guest.
type Context struct {
	Method, Peer string
	// Timeout is the time until the deadline, in nanoseconds; nil means no deadline.
	Timeout  *uint64
	Metadata []Entry
}

// Status is the failure of a call.
type Status struct {
	Code    uint32
	Message string
	Details [][]byte // serialized google.protobuf.Any
}

// AppendContext appends the flat value of ContextType.
func AppendContext(dst []byte, c *Context) []byte {
	dst = wit.AppendString(dst, c.Method)
	dst = wit.AppendString(dst, c.Peer)
	dst = wit.AppendOption(dst, c.Timeout != nil)
	if c.Timeout != nil {
		dst = wit.AppendU64(dst, *c.Timeout)
	}
	dst = wit.AppendLen(dst, len(c.Metadata))
	for _, e := range c.Metadata {
		dst = wit.AppendBytes(wit.AppendString(dst, e.Key), e.Value)
	}
	return dst
}

// AppendStatus appends the flat value of StatusType.
func AppendStatus(dst []byte, s *Status) []byte {
	dst = wit.AppendU32(dst, s.Code)
	dst = wit.AppendString(dst, s.Message)
	dst = wit.AppendLen(dst, len(s.Details))
	for _, d := range s.Details {
		dst = wit.AppendBytes(dst, d)
	}
	return dst
}

// ReadStatus reads a value of StatusType. The Details share memory with the reader's input. After a failure, r.Err
// returns the error.
func ReadStatus(r *wit.Reader) Status {
	s := Status{Code: r.U32(), Message: r.String()}
	for range r.Len() {
		if s.Details = append(s.Details, r.Bytes()); r.Err() != nil {
			return Status{}
		}
	}
	return s
}

// ReadEntry reads a value of EntryType. The Value shares memory with the reader's input.
func ReadEntry(r *wit.Reader) Entry {
	return Entry{Key: r.String(), Value: r.Bytes()}
}
