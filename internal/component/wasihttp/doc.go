// Package wasihttp serves HTTP requests with guests of the world wasi:http/incoming-handler (WASI 0.2). The engine's C
// API has no wasi:http, so this package implements the types of wasi:http as host resources on top of net/http. The
// streams come from internal/component/wasi.
//
//	http.Handler of the worker ──► Session.Serve(w, r, call) ──call: the guest's handle(request, response-outparam)──► guest
//	        ▲                            │                                                                              │
//	        │ status, header, body ◄── exchange ◄── host functions: incoming-request, outgoing-response, streams ◄──────┘
//
// A Session is the host's side of one instance; an exchange is one request with its response. The request ends when the
// guest's handle function returns: a body that the guest has not finished by then is cut off. Bodies are streamed in
// both directions. The buffer between guest and network is at most 64 KiB, so a slow side slows down the other side.
//
// The server owns the connection: guests cannot use fields such as connection, host or transfer-encoding. Guests have
// no network. The interface outgoing-handler denies every request. Without it, guests that import it could not run.
//
// The package must not depend on pods or sockets. Only host.go imports the engine (cgo).
package wasihttp
