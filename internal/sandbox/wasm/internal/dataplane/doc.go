// Package dataplane serves the requests that reach a Wasm pod: gRPC (and gRPC-Web and Connect) over HTTP/3, HTTP/2 over
// TLS, h2c and HTTP/1.1, and plain HTTP for components of the wasi:http world.
//
//	UDP socket ──► QUIC ──► HTTP/3 ─┐
//	TCP socket ──► TLS ──► h2, h1 ──┼──► Server ──► NewGRPC ──► framing, deadline, limits, health, reflection ──► Invoker
//	TCP socket ──► h2c, h1 ─────────┘         └───► NewHTTP ──► limits ──► handler of the component
//
// The package owns what lies between a socket and a component: protocols, TLS, framing, compression, deadlines,
// bounds, drain, counters and spans. What a message means is not its business: it hands over the bytes of protobuf
// messages, and Invoker (which package worker implements) makes a component answer them. It must not import
// the engine.
//
// gRPC proper is framed here, not by connect-go: it is what the pods' clients speak, and the framing costs a third of
// the time this way (BenchmarkHandler).
// connect-go serves gRPC-Web, Connect, and gRPC with JSON; all end in the same Invoker. Health is the package's own, for
// Watch; reflection is connectrpc.com/grpcreflect's.
//
// An idle Server is its sockets, three goroutines and some 25 KiB: what QUIC and HTTP/2 need is made when the first
// client connects (TestIdleServerMemory).
//
// # Who owns a buffer
//
// The requests of all clients share pools. A buffer that is used again while somebody still reads it shows one client
// the bytes of another, so each has one owner at a time:
//
//	buffer                        it is the caller's           it is lent or given away              used again
//	connect-go's pool             never                        to Codec.Unmarshal, until it returns: after the message is
//	                                                           binaryCodec copies. With what         written, for any request
//	                                                           Codec.Marshal returns, for good
//	grpcCall.in                   until the next Receive       to Invoke, with Receive's result      by the next Receive;
//	                                                                                                 pooled at the end
//	grpcCall.out                  within Send                  to ResponseWriter.Write, until it     by the next Send;
//	                                                           returns                               pooled at the end
//	gzip readers, writers         within gunzip, gzipTo        never; Reset drops the last buffer    after each message
//	worker: buffer.args, .result  within Invoke                to engine.Call, until it returns: a   after Invoke
//	                                                           guest that may be left behind gets
//	                                                           a copy
//	worker: buffer.message,       within Invoke                to Call.Send, until it returns        by the next Send, or
//	grpcCall.out                                                                                     Invoke
//	worker: grpcCall.reply        within a host function       to the engine, until it has copied    by the next one
//	                                                           it (twHost)
//	engine: a host call's args    never: the guest's thread    to the host function, until it        by the next one
//	                              owns them                    returns
//	protowit: encoder, decoder    within Encode, Decode        never; the messages are the caller's  after each
//	wasi: windows                 from the first read to       to Reader.Next's caller, until the    after Release, which
//	                              Release                      next Next                             waits for a read
//	wasi: State.out               within Invoke of a function  to the engine, as grpcCall.reply      by the next one
//	wasi: Writer.pending          from Write until drain       to io.Writer.Write, until it returns  never
//	router: 32 KiB windows        while a response is copied   to ResponseWriter.Write, until it     after the response
//	                                                           returns
//	channellink: link.out         within write                 to net.Conn.Write, until it returns   by the next write
//	channel: Conn.out             within write                 to net.Conn.Write, until it returns   by the next write
//
// Write of net/http and quic-go keeps nothing once it has returned, also when it fails: HTTP/2 encodes a frame before the
// handler goes on (go.dev/issue/58446) and HTTP/3 copies into packets under the stream's lock. Payloads of channels are
// not in the list: port.Send makes a copy, which nobody writes on again. TestFaultW8_NoForeignBytes and test/e2e
// TestW8NoForeignBytes look for foreign bytes.
//
// Sources: gRPC over HTTP/2 (grpc/doc/PROTOCOL-HTTP2.md), gRPC over HTTP/3 (grpc/proposal G2), RFC 9114 (HTTP/3),
// RFC 9113 (HTTP/2), RFC 7838 (Alt-Svc), grpc/doc/statuscodes.md, grpc/doc/health-checking.md, W3C Trace Context.
package dataplane
