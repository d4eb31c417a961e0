// Package wasihttp serves HTTP requests by guests of the world wasi:http/incoming-handler (WASI 0.2). The engine's C API
// has no wasi:http, so its types are host resources here, over net/http, and its streams are those of internal/component/wasi.
//
//	http.Handler of the worker ──► Session.Serve(w, r, call) ──call: the guest's handle(request, response-outparam)──► guest
//	        ▲                            │                                                                              │
//	        │ status, header, body ◄── exchange ◄── host functions: incoming-request, outgoing-response, streams … ◄────┘
//
// A Session is the host's side of one instance, an exchange one request and its response. The request is over when handle
// returns: what the guest has not finished by then is cut off. Bodies are streamed in both directions with at most 64 KiB
// between the guest and the network, so that either holds up the other.
//
// The server keeps what belongs to it: fields such as connection, host or transfer-encoding are forbidden to the guest. The
// guest has no network: outgoing-handler is there, so that guests which import it can run, and denies every request.
//
// The package must not know pods or sockets. It imports the engine (cgo) in one file, for the types of its host functions.
package wasihttp
