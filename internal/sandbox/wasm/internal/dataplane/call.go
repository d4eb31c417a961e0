package dataplane

import (
	"context"
	"net/http"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// Method is one method that a component serves.
type Method struct {
	// Procedure is the path of the method's requests, /package.Service/Method.
	Procedure string
	Desc      protoreflect.MethodDescriptor
}

// Methods returns the methods of a service in the order of their declaration.
func Methods(service protoreflect.ServiceDescriptor) []*Method {
	list := service.Methods()
	methods := make([]*Method, list.Len())
	for i := range methods {
		desc := list.Get(i)
		methods[i] = &Method{Procedure: "/" + string(service.FullName()) + "/" + string(desc.Name()), Desc: desc}
	}
	return methods
}

// Invoker carries out calls. The worker implements it with a component.
type Invoker interface {
	// Invoke carries out one call. ctx ends at the request's deadline or when the client disconnects. An error that is
	// neither a *Status nor a context error becomes the status INTERNAL, and its text appears only in the log.
	Invoke(ctx context.Context, m *Method, c Call) error
}

// Call is one call of a method. Messages are in protobuf's binary encoding, whatever protocol the client uses.
//
// One goroutine can call Receive while another calls Send.
type Call interface {
	// Receive waits for the client's next message, and returns io.EOF after the last message. If the method is not
	// client-streaming, the client sends exactly one message. The message is valid until the next Receive or the end of
	// Invoke.
	Receive() ([]byte, error)
	// Send sends a message, and blocks while the client does not read. If the method is not server-streaming, call Send
	// exactly once. Send does not retain the message, even if Send fails.
	Send(message []byte) error
	// SendHeader sends ResponseHeader before the first message, where the protocol can. It does nothing if the header
	// has been sent.
	SendHeader() error
	// Interrupt makes a Receive in progress and all later ones fail soon.
	Interrupt()
	// RequestHeader returns the unmodified request header, which Metadata converts to gRPC metadata.
	RequestHeader() http.Header
	// The first Send or SendHeader sends ResponseHeader. ResponseTrailer is sent after Invoke has returned. Use SetMetadata to add to
	// either.
	ResponseHeader() http.Header
	ResponseTrailer() http.Header
	// Peer returns the client's address, IP:port.
	Peer() string
}
