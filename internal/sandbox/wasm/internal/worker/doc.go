// Package worker runs the pods of a Wasm worker: what the daemon orders through internal/sandbox/wasm/internal/workerapi, it does with the
// engine, the data plane and the conversion of messages.
//
//	control.Server ──► Worker ──┬─► code   loaded component + schema + host functions, by digest
//	                            └─► pod    ID, limits, account, output, status
//	                                 ├─ server    dataplane.Server ──► handler ──► an instance per request
//	                                 │             (gRPC: grpc.go, streams.go; wasi:http: http.go)
//	                                 └─ command   one instance, one run
//	data socket ──► header Tripod-Container ──► the pod's handler
//	command ──► channels ──► other pods' channels (channel.Router), and a connection to the daemon that comes and goes
//
// It owns the pods: their sockets, logs, attached clients, instances and what is counted of them. It is told all that it
// needs; it knows nothing of the node, opens no file and no socket, and starts no process (internal/sandbox/wasm/internal/lockdown sees
// to that).
//
// # Isolation
//
// A request gets an instance of its own, made for it and gone with it, unless the pod's limits say reuse: then idle
// instances are kept, a few, for requests to come. An instance in which anything went wrong is never used again.
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
// WASI has no signals: a command that is stopped meets the end of its standard input and its channels, if it has any, and
// can end by itself until the grace is over.
//
// A request's own failure never ends a server: it is that request's status (grpc.go) and a line in the pod's log.
//
// # Back-pressure
//
// Guests block, on threads of their own, in what they call: a stream's next waits for the client's message, send for
// room towards the client. Output goes to the log file at once; attached clients have a bounded buffer each, and one that
// does not read is cut off, so that no client ever holds a guest. Messages of channels wait in queues with bounds, where the
// oldest go; only a daemon that reads makes a guest wait for room towards it.
package worker
