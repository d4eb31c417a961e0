// Package worker runs the pods of a Wasm worker: it carries out the daemon's orders (package workerapi) with the engine, the
// data plane and the conversion of messages. Begin with worker.go, which has a method for each order.
//
//	workerapi.Server ──► Worker ──┬─► code   loaded component + schema + host functions, by digest
//	                            └─► pod    ID, limits, account, output, status
//	                                 ├─ server    dataplane.Server ──► handler ──► an instance per request
//	                                 │             (gRPC: grpc.go, streams.go; wasi:http: http.go)
//	                                 └─ command   one instance, one run
//	data socket ──► header Tripod-Container ──► the pod's handler
//	command ──► channels ──► other pods' channels (channel.Router), and a connection to the daemon that comes and goes
//
// It owns the pods: their sockets, logs, attached clients, instances and counters. The daemon sends all that it needs: it
// knows nothing of the node, opens no file and no socket, and starts no process (package lockdown enforces that).
//
// # Isolation
//
// A request gets a fresh instance, which is closed after it, unless the pod's limits allow reuse: then the pod keeps a few
// idle instances. An instance in which anything failed is never used again.
//
// # How pods end
//
//	                                          exit code  reason
//	command ends by itself, code n            n          Completed (0), Error
//	command traps                             134        Error, the trap in the message (128+SIGABRT)
//	command is over its memory                137        OOMKilled
//	server, Stop: all requests were answered  0          Completed
//	killed: Kill, or the grace is over        137        Error (128+SIGKILL)
//
// WASI has no signals. When a command is stopped, its standard input and its channels end, and it can exit by itself until
// the grace period is over.
//
// A request's own failure never ends a server: it is that request's status (grpc.go) and a line in the pod's log.
//
// # Back-pressure
//
// Guests block in host functions, on threads of their own: a stream's next waits for the client's message, send for room
// towards the client. Output goes to the log file at once. Each attached client has a bounded buffer, and a client that does
// not read is disconnected, so no client ever blocks a guest. Channels queue messages within bounds and drop the oldest; a
// guest waits for room only towards a daemon that reads.
package worker
