// Package dataplane serves the requests to a Wasm pod: gRPC, gRPC-Web and Connect over HTTP/3, HTTP/2 over TLS, h2c and
// HTTP/1.1, and plain HTTP for components of the wasi:http world.
//
//	UDP socket ──► QUIC ──► HTTP/3 ─┐
//	TCP socket ──► TLS ──► h2, h1 ──┼──► Server ──► NewGRPC ──► framing, deadline, limits, health, reflection ──► Invoker
//	TCP socket ──► h2c, h1 ─────────┘         └───► NewHTTP ──► limits ──► the component's handler
//
// WithCORS answers for either of them to the browsers of web pages.
//
// The package owns everything between a socket and a component: protocols, TLS, framing, compression, deadlines,
// limits, draining, counters and spans. It does not interpret messages: it passes the bytes of protobuf messages to an
// Invoker, which package worker implements with a component. The package must not import the engine.
//
// The package implements the framing of gRPC itself, because connect-go takes three times as long (BenchmarkHandler)
// and most clients of pods use gRPC. connect-go serves gRPC-Web, Connect, and gRPC with JSON, through the same Invoker.
// Two conversions come before connect-go: webText makes gRPC-Web's text format binary, and HalfDuplex reads the rest of
// a request over HTTP/1.1 before the response begins. The package has its own health service, which supports Watch.
// Reflection is from connectrpc.com/grpcreflect.
//
// An idle Server uses its sockets, three goroutines and about 25 KiB of memory. It allocates the state for QUIC and
// HTTP/2 when the first client connects (TestIdleServerMemory).
//
// # Buffer ownership
//
// The requests of all clients share buffer pools. If a buffer is reused while it is still being read, one client sees
// another client's bytes. So each buffer has one owner at a time:
//
//	buffer                        owned by the package         lent or given away                    reused
//	connect-go's pool             never                        to Codec.Unmarshal, until it returns  after the message is
//	                                                           (binaryCodec copies); Codec.Marshal   written, for any request
//	                                                           gives its result away
//	grpcCall.in                   until the next Receive       to Invoke, with Receive's result      by the next Receive;
//	                                                                                                 pooled at the end
//	grpcCall.out                  within Send                  to ResponseWriter.Write, until it     by the next Send;
//	                                                           returns                               pooled at the end
//	webTextWriter: rest, out      within Write, Flush          to ResponseWriter.Write, until it     by the next Write
//	                                                           returns
//	h2: chunks of a body          until they are read          never; Read copies                    after that, for any request
//	h2: frames for a socket       from a Write to flush        to net.Conn.Write, until it returns   after that, for any connection
//	halfDuplexBody.ahead          until it is read             never; Read copies                    never
//	gzip readers, writers         within gunzip, gzipTo        never; Reset drops the last buffer    after each message
//	worker: buffer.args, .result  within Invoke                to engine.Call, until it returns (a   after Invoke
//	                                                           guest that can outlive the call gets
//	                                                           a copy)
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
// The Write methods of h2, net/http and quic-go do not retain the buffer, even if they fail: h2 copies the bytes into the
// frames for the socket, and HTTP/3 into packets under the stream's lock. The table omits channel messages, because
// port.Send makes a copy that is never modified. TestFaultW8_NoForeignBytes and TestW8NoForeignBytes (test/e2e) check that
// no client sees another client's bytes.
//
// Sources: gRPC over HTTP/2 (grpc/doc/PROTOCOL-HTTP2.md), gRPC over HTTP/3 (grpc/proposal G2), RFC 9114 (HTTP/3),
// RFC 9113 (HTTP/2), RFC 7838 (Alt-Svc), grpc/doc/statuscodes.md, grpc/doc/health-checking.md, W3C Trace Context.
package dataplane
