package dataplane

import (
	"context"
	"net/http"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// Method is one method that a component serves.
type Method struct {
	// Procedure is the path of its requests, /package.Service/Method.
	Procedure string
	Desc      protoreflect.MethodDescriptor
}

// Methods lists the methods of a service in the order of its declaration.
func Methods(service protoreflect.ServiceDescriptor) []*Method {
	list := service.Methods()
	methods := make([]*Method, list.Len())
	for i := range methods {
		desc := list.Get(i)
		methods[i] = &Method{Procedure: "/" + string(service.FullName()) + "/" + string(desc.Name()), Desc: desc}
	}
	return methods
}

// Invoker answers calls. The worker implements it with a component.
type Invoker interface {
	// Invoke answers one call and returns when the call is over. ctx ends at the request's deadline and when the client
	// goes away. An error that is not a *Status and not that of a context becomes INTERNAL, and its text goes to the log
	// only.
	Invoke(ctx context.Context, m *Method, c Call) error
}

// Call is one call of a method, of any arity, in protobuf's binary encoding whatever the client speaks.
//
// Receive and Send may be used by two goroutines at the same time, each of them by one.
type Call interface {
	// Receive waits for the next message of the client; io.EOF when there is none any more. A method that does not
	// stream from its client has one message exactly. The message is valid until the next Receive, or the end of Invoke.
	Receive() ([]byte, error)
	// Send sends a message, and blocks while the client does not read. A method that does not stream to its client sends
	// one exactly. The message is the caller's again when Send returns, also when it fails.
	Send(message []byte) error
	// RequestHeader is the request's header as it came; Metadata reads it as gRPC metadata.
	RequestHeader() http.Header
	// ResponseHeader takes metadata until the first Send, ResponseTrailer until the end of Invoke; SetMetadata writes
	// them.
	ResponseHeader() http.Header
	ResponseTrailer() http.Header
	// Peer is the client's address, IP:port.
	Peer() string
}
