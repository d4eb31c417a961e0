// Package grpcclient makes the outgoing gRPC calls of guests that exchange serialized messages with the host. It frames
// messages, and translates metadata, deadlines and statuses (grpc/doc/PROTOCOL-HTTP2.md). Connections belong to the
// http.RoundTripper, which must use HTTP/2 only. Begin with Call.
//
//	guest ──► Call.Send ──► body ──► RoundTripper ──► server
//	  ▲                                                 │
//	  └── Call.Next, Take ◄──── receive (goroutine) ◄───┘
//
// A Call holds at most one message in each direction, besides the window of its stream. The wasi.State of the guest
// counts both, so the limits of an instance and of a pod on held bytes also limit their calls.
//
// The package does not compress, repeat calls or follow redirects.
package grpcclient
