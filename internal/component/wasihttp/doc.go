// Package wasihttp serves HTTP requests with guests of the world wasi:http/incoming-handler (WASI 0.2), and sends the
// requests of guests that import wasi:http/outgoing-handler. The engine's C
// API has no wasi:http, so this package implements the types of wasi:http as host resources on top of net/http. The
// streams come from internal/component/wasi.
//
//	http.Handler of the worker ──► Session.Serve(w, r, call) ──call: the guest's handle(request, response-outparam)──► guest
//	        ▲                            │                                                                              │
//	        │ status, header, body ◄── exchange ◄── host functions: incoming-request, outgoing-response, streams ◄──────┘
//
//	http.RoundTripper (wasi.Options.HTTP) ◄── call ◄── host functions: outgoing-request, incoming-response, streams ◄── guest
//
// A Session is the host's side of one instance; an exchange is one request with its response. The request ends when the
// guest's handle function returns: a body that the guest has not finished by then is cut off. Bodies are streamed in
// both directions. The buffer between guest and network is at most 64 KiB, so a slow side slows down the other side.
//
// The host owns the connections: guests cannot use fields such as connection, host or transfer-encoding. A call lasts as
// long as the guest's resources that lead to its response. Without an http.RoundTripper, every request is denied.
//
// The package must not depend on pods or sockets. Only host.go imports the engine (cgo).
package wasihttp
