package protowit

import (
	"github.com/tripod-run/tripod/internal/component/wit"
)

// ClientInterface is the interface for calls of guests that exchange protobuf bytes to other servers (sdk/wit).
const ClientInterface = "tripod:grpc/client@0.1.0"

// ModuleInterfaces are the interfaces that core modules in the raw world can import, besides WASI preview 1.
var ModuleInterfaces = []string{RawInterface, ResponseInterface, ClientInterface}

// The functions of ClientInterface.
const (
	ClientStart  = "start"
	ClientSend   = "send"
	ClientFinish = "finish"
	ClientNext   = "next"
	ClientTake   = "take"
	ClientEvents = "events"
	ClientClose  = "close"
)

var (
	// RequestType is tripod:grpc/client.request.
	RequestType = &wit.Type{Kind: wit.Record, Name: "request", Fields: []wit.Field{
		{Name: "target", Type: stringType}, {Name: "authority", Type: optionOf(stringType)}, {Name: "method", Type: stringType},
		{Name: "timeout", Type: optionOf(u64Type)}, {Name: "metadata", Type: listOf(EntryType)}, {Name: "max-receive", Type: u32Type},
	}}
	// StartedType is result<u32, status>.
	StartedType = &wit.Type{Kind: wit.Result, Ok: u32Type, Err: StatusType}
	// EventType is tripod:grpc/client.event.
	EventType = &wit.Type{Kind: wit.Variant, Name: "event", Cases: []wit.Case{
		{Name: "header", Type: listOf(EntryType)}, {Name: "message", Type: u32Type},
		{Name: "end", Type: &wit.Type{Kind: wit.Record, Name: "outcome", Fields: []wit.Field{
			{Name: "error", Type: EndedType}, {Name: "trailer", Type: listOf(EntryType)},
		}}},
		{Name: "pending"},
	}}
	// SendingType is tripod:grpc/client.sending.
	SendingType = &wit.Type{Kind: wit.Enum, Name: "sending", Cases: []wit.Case{{Name: "sent"}, {Name: "pending"}, {Name: "ended"}}}
)
