package protowit

import (
	"github.com/tripod-run/tripod/internal/component/wit"
	witfiles "github.com/tripod-run/tripod/sdk/wit"
)

// The names of the interfaces for guests that exchange protobuf bytes (sdk/wit).
const (
	RawInterface         = "tripod:grpc/raw@0.1.0"
	HandlerInterface     = "tripod:grpc/handler@0.1.0"
	DescriptorsInterface = "tripod:grpc/descriptors@0.1.0"
	SnapshotInterface    = "tripod:grpc/snapshot@0.1.0"
	WarmInterface        = "tripod:grpc/warm@0.1.0"
)

// The functions of RawInterface.
const (
	RawReceive    = "receive"
	RawTake       = "take"
	RawSend       = "send"
	RawSendHeader = "send-header"
	RawEnded      = "ended"
	RawEvents     = "events"
)

// Handle is the function of HandlerInterface, of type func(ContextType) -> DoneType. Describe is the function of
// DescriptorsInterface. Prepare is the function of SnapshotInterface, and Warm of WarmInterface.
const (
	Handle   = "handle"
	Describe = "describe"
	Prepare  = "prepare"
	Warm     = "warm"
)

// Cases of ReceivedType.
const (
	ReceivedMessage = iota
	ReceivedEnd
	ReceivedPending
)

var (
	// BytesType is list<u8>.
	BytesType = bytesType
	// BoolType is bool, and U32Type is u32.
	BoolType, U32Type = boolType, u32Type
	// DoneType is result<_, status>.
	DoneType = &wit.Type{Kind: wit.Result, Err: StatusType}
	// EndedType is option<status>.
	EndedType = optionOf(StatusType)
	// ReceivedType is result<received, status>.
	ReceivedType = &wit.Type{Kind: wit.Result, Err: StatusType, Ok: &wit.Type{Kind: wit.Variant, Name: "received", Cases: []wit.Case{
		{Name: "message", Type: u32Type}, {Name: "end"}, {Name: "pending"},
	}}}
)

// RawDocument is the text of the WIT world for guests that exchange protobuf bytes.
func RawDocument() string { return witfiles.Host + witfiles.Raw + witfiles.Client }
