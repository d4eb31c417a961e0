// Package control is how the daemon speaks with a Wasm worker: the protocol, a client for the daemon's side
// (internal/sandbox/wasm) and a server for the worker's (internal/sandbox/wasm/internal/worker).
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
//   - Connections hold no state but the subscription to events. Many may be open, each may break at any time, and an
//     order that was begun is carried out to its end whether or not somebody still waits for the reply.
//   - Events are hints. What they tell of pods is in List as well, until Remove; a daemon that was away asks List.
//   - A Hello that subscribes is answered when the orders of clients that are gone have been carried out (Stop aside),
//     so that the next daemon's List is the truth.
//   - Orders are idempotent: Kill, Remove, Unload of what is not there succeed.
//   - The server never waits for a client: one that does not read is cut off.
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
// lines; it should be a file or something else that outlives the daemon. The worker drops root by itself
// (WorkerConfig.UID) and then writes one line, "ready", to descriptor 5 and closes it; without that line it has
// failed, and standard error says why. SIGTERM ends all pods at once, and then the worker.
//
// It compiles a component with
//
//	tripod-wasm compile CONFIG <component.wasm >code        CONFIG is CompileConfig as JSON
//
// whose exit code is one of the Compile constants, with one line for a person on standard error; `tripod-wasm fingerprint`
// prints what the code depends on besides the component (Hello.Engine).
package workerapi
