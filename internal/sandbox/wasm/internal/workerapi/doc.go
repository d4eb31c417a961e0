// Package workerapi implements the protocol between the daemon and a Wasm worker: a client for the daemon (the backend,
// internal/sandbox/wasm) and a server for the worker (internal/sandbox/wasm/internal/worker). Begin with messages.go.
//
//	daemon ── Client ──► unix socket, 0700 directory ──► Server ── Handler ──► worker
//	            ▲   frames: length, descriptors, JSON      │
//	            └────────── replies · events ◄─────────────┘
//
// A frame is an 8-byte header and a JSON message. The header is the length of the message and the number of file
// descriptors passed with the frame (SCM_RIGHTS, unix(7)), both uint32, big endian. A message is a request (op, id,
// body), a reply (the same id, body or error) or an event (op without id). Replies can come in any order. Errors keep
// their errdefs class over the wire.
//
// The daemon can die and restart at any time, because:
//
//   - The only state of a connection is its subscription to events. Many connections can be open, and each can break at
//     any time. The server completes every order that it has begun, even if the client has disconnected.
//   - Events are hints. List reports the same exits until Remove, so a restarted daemon calls List.
//   - If a Hello subscribes to events, the server answers only once all orders of disconnected clients, except Stop,
//     are complete. So those orders cannot change what a later List returns.
//   - Orders are idempotent: Kill, Remove and Unload succeed if their object does not exist.
//   - The server never waits for a client. It disconnects a client that does not read.
//
// The package must not import the engine or anything else that needs cgo, because the daemon is pure Go.
//
// # Programs
//
// The daemon starts a worker as
//
//	tripod-wasm worker CONFIG        CONFIG is WorkerConfig as JSON
//
// with two listening unix stream sockets. Descriptor 3 (control) serves this protocol. Descriptor 4 (data) serves
// cleartext HTTP/2 to the node's router, which names the pod in the header HeaderContainer. The worker logs JSON lines
// to standard error, which should be a file or another object that outlives the daemon. The worker gives up its root
// privileges itself (WorkerConfig.UID). It then writes the line "ready" to descriptor 5 and closes the descriptor. If a
// worker ends without writing this line, its start has failed, and standard error says why. SIGTERM kills all pods
// immediately and then ends the worker.
//
// `tripod-wasm dialer CONFIG` opens the connections of the pods of all workers (package dialer). The daemon starts it in
// the same namespaces as a worker, as the workers' user, with CAP_SYS_ADMIN.
//
// The daemon compiles a component with
//
//	tripod-wasm compile CONFIG <component.wasm >code        CONFIG is CompileConfig as JSON
//
// The exit code is one of the Compile constants, and if the compilation fails, standard error has a one-line message.
// `tripod-wasm fingerprint` prints what the code depends on besides the component (Hello.Engine).
package workerapi
