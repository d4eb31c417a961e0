// Package workerapi is the protocol between the daemon and a Wasm worker, with a client for the daemon (the backend,
// internal/sandbox/wasm) and a server for the worker (package worker beside this one). Begin with messages.go.
//
//	daemon ── Client ──► unix socket, 0700 directory ──► Server ── Handler ──► worker
//	            ▲   frames: length, descriptors, JSON      │
//	            └────────── replies · events ◄─────────────┘
//
// A frame is a header of 8 bytes and a JSON message; the header is the length of the message and the number of file
// descriptors that travel with the frame by SCM_RIGHTS (unix(7)), both uint32, big endian. A message is a request
// (op, id, body), a reply (the same id, body or error) or an event (op without id). Replies come in any order. Errors
// keep their errdefs class over the wire.
//
// What makes the daemon expendable:
//
//   - A connection has no state but its subscription to events. Many may be open, and each may break at any time. The
//     server completes an order that it has begun, whether or not a client still waits for the reply.
//   - Events are hints. What they report of pods is in List as well, until Remove. A daemon that was away calls List.
//   - A Hello that subscribes is answered once all orders of clients that are gone are complete, except Stop. What List
//     reports after it is therefore final.
//   - Orders are idempotent: Kill, Remove and Unload succeed when their object does not exist.
//   - The server never waits for a client. It disconnects one that does not read.
//
// The package must not import the engine, nor anything else that needs cgo: the daemon is pure Go.
//
// # Programs
//
// The daemon starts a worker as
//
//	tripod-wasm worker CONFIG        CONFIG is WorkerConfig as JSON
//
// with two listening unix stream sockets, control as descriptor 3 (this protocol) and data as descriptor 4 (cleartext
// HTTP/2 for the node's router, the header HeaderContainer picks the pod). Standard error takes the worker's log, as JSON
// lines; it should be a file, or another object that outlives the daemon. The worker drops root by itself
// (WorkerConfig.UID). It then writes one line, "ready", to descriptor 5 and closes it. A worker that ends without that line
// has failed, and standard error says why. SIGTERM ends all pods at once, and then the worker.
//
// It compiles a component with
//
//	tripod-wasm compile CONFIG <component.wasm >code        CONFIG is CompileConfig as JSON
//
// whose exit code is one of the Compile constants, with one line for a person on standard error; `tripod-wasm fingerprint`
// prints what the code depends on besides the component (Hello.Engine).
package workerapi
