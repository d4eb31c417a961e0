// Package dataplane serves the requests that reach a Wasm pod: gRPC (and gRPC-Web and Connect) over HTTP/3, HTTP/2 over
// TLS, h2c and HTTP/1.1, and plain HTTP for components of the wasi:http world.
//
//	UDP socket ──► QUIC ──► HTTP/3 ─┐
//	TCP socket ──► TLS ──► h2, h1 ──┼──► Server ──► NewGRPC ──► framing, deadline, limits, health, reflection ──► Invoker
//	TCP socket ──► h2c, h1 ─────────┘         └───► NewHTTP ──► limits ──► handler of the component
//
// The package owns what lies between a socket and a component: protocols, TLS, framing, compression, deadlines,
// bounds, drain, counters and spans. What a message means is not its business: it hands over the bytes of protobuf
// messages, and Invoker (which internal/wasm/worker implements) makes a component answer them. It must not import
// the engine.
//
// gRPC proper is framed here, not by connect-go: it is what the pods' clients speak, and the framing costs a third of
// the time this way (BenchmarkHandler).
// connect-go serves gRPC-Web, Connect, and gRPC with JSON; all end in the same Invoker. Health is the package's own, for
// Watch; reflection is connectrpc.com/grpcreflect's.
//
// An idle Server is its sockets, three goroutines and some 25 KiB: what QUIC and HTTP/2 need is made when the first
// client comes (TestIdleServerMemory).
//
// Sources: gRPC over HTTP/2 (grpc/doc/PROTOCOL-HTTP2.md), gRPC over HTTP/3 (grpc/proposal G2), RFC 9114 (HTTP/3),
// RFC 9113 (HTTP/2), RFC 7838 (Alt-Svc), grpc/doc/statuscodes.md, grpc/doc/health-checking.md, W3C Trace Context.
package dataplane
