// Package h2 serves HTTP/2 (RFC 9113) through an http.Handler, in place of the server in net/http, which hands each frame
// of an answer between goroutines and writes it by itself (ADR 71).
//
//	socket ──► conn.serve: frames ──► stream: body, windows ──► goroutine: http.Handler ──► response
//	socket ◄── conn.flush ◄── conn.out ◄─────────────────── headers, data, trailers ◄──────────┘
//
// The frames and the compression of headers are those of golang.org/x/net/http2 and hpack. A connection has one reading
// goroutine, and one goroutine for each request. There is no writing goroutine: whoever adds frames to conn.out writes
// them to the socket, unless another goroutine is writing already, which then writes these too. So a unary gRPC answer is
// one write, and the answers to many requests at once share one.
//
// conn.mu guards everything of a connection and its streams but the request, the response's header, and what only the
// reading goroutine uses. It is released while a goroutine waits for the socket, a window or a client's data.
//
// # Bounds
//
// A client can cost what a request costs, and little more:
//
//	unread data          the windows: Config.StreamWindow and Config.ConnWindow
//	requests             Config.MaxStreams, and as many again that were reset and whose handlers still run
//	a header             Config.MaxHeaderBytes; the rest of a longer one is dropped up to maxBlock
//	unwritten frames     outHigh; then handlers, and at twice as much also the reading, wait for the socket
//	useless frames       budget: PING, SETTINGS, PRIORITY, empty DATA, resets of either side
//	a client that reads nothing, or says nothing    Config.StuckTime, Config.GoneAfter
package h2
