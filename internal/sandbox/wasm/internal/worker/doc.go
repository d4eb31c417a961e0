// Package worker runs the pods of a Wasm worker. It carries out the daemon's orders (package workerapi) with the
// engine, the data plane and protowit's message conversion. Begin with worker.go, which has a method for each order.
//
//	workerapi.Server ──► Worker ──┬─► code   loaded component + schema + host functions, by digest
//	                            └─► pod    ID, limits, account, output, status
//	                                 ├─ server    dataplane.Server ──► handler ──► an instance per request
//	                                 │             (gRPC: grpc.go, streams.go; wasi:http: http.go)
//	                                 └─ command   one instance, one run
//	data socket ──► header Tripod-Container ──► the pod's handler
//	command ──► channels ──► other pods' channels (channel.Router), and a connection to the daemon, which may be absent
//
// The package owns the pods: their sockets, logs, attached clients, instances and counters. The daemon sends everything
// that the worker needs. The worker opens no files or sockets and starts no processes; package lockdown enforces that.
//
// # Isolation
//
// Each request gets a fresh instance, which is closed afterwards. It can begin in the state that the initialization of
// another instance has left (snapshot.go). If the pod's limits allow reuse, the pod keeps a few
// idle instances. An instance that failed in any way is never reused.
//
// # Exit codes
//
//	                                          exit code  reason
//	command exits with code n                 n          Completed (0), Error
//	command traps                             134        Error, the trap in the message (128+SIGABRT)
//	command exceeds its memory limit          137        OOMKilled
//	server stopped, all requests answered     0          Completed
//	killed, or the grace period expired       137        Error (128+SIGKILL)
//
// WASI has no signals. When a command is stopped, it gets end of file on its standard input and channels, and can exit
// by itself until the grace period expires.
//
// A failed request never ends a server. The client gets a status (grpc.go), and a line is written to the pod's log.
//
// # Back-pressure
//
// Guests block in host functions, on their own threads: the function next of a stream waits for a message from the
// client, and the function send waits for room in the client's flow-control window. Output is written to the log file
// immediately. Each attached client has a bounded buffer and is disconnected if it does not read, so no attached client
// ever blocks a guest. The queues of channels are bounded. If a guest does not read, its oldest messages are dropped.
// If the backlog to the daemon is full, the guest waits for room while a daemon is reading; otherwise, the oldest
// messages in the backlog are dropped.
package worker
