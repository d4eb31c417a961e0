// Package wasm runs unit pods whose container is a WebAssembly component. This package is the daemon's part: it finds
// and compiles the component, opens the pod's sockets, log and mounts, and passes them to a worker process
// (tripod-wasm), which runs the guest and serves the requests to the pod.
//
//	images ─▶ code.Precompiler ─▶ code.Cache: what a pull brings is compiled before a pod needs it
//
//	node ──▶ Backend                                    <Root>/                       survives a reboot
//	           │ CreateContainer                            cache/<digest>/<engine>.{code,json}
//	           │   artifact ─▶ cache ─▶ compile (a child)   ca.crt  ca.key
//	           │   worker: Load
//	           │ StartContainer                          <RunDir>/                     gone after a reboot
//	           │   sockets in the pod's netns               pods/<key>/{pod,container}.json
//	           │   log file · mounts · certificate          workers/<name>/{control,data}.sock  log  worker.json
//	           │   dialer: opens egress                     dialers/<name>/control.sock  log  worker.json
//	           ▼   one message, with descriptors
//	 workers.Keeper ──control.sock──▶ tripod-wasm worker    outlives the daemon; owns sockets, streams, guests
//	           │ a pidfd and the connection show when a worker has ended
//	           └─ one per node, per namespace or per pod
//
// <key> is the pod's ID if the ID is 64 hexadecimal digits, otherwise the SHA-256 of the ID (names.go). The ID of a pod
// with a component name can be too long for a file name.
//
// A container's worker knows the container's state, and keeps its exit status until the daemon removes the container.
// The files in RunDir record the daemon's view of a container: created, started in a certain worker, or exited. No
// matter when the daemon is killed, the next daemon can distinguish a container that never started from a container
// whose worker died. The files are on a tmpfs and are not synced, because a crash that loses them also ends the
// workers.
//
// Compiled code is machine code that a worker executes. A worker loads only code that this daemon wrote: other users
// have no access to the cache, and each file is compared with its recorded checksum before every load (docs/faults.md,
// I7). The compiler reads untrusted input, so it runs in an unprivileged process (docs/faults.md, I6).
//
// The package must not import the engine, because the daemon is pure Go. The node, not this package, decides what state
// a pod is in. Requests to pods do not pass through the daemon, unless they are sent to the node's own addresses
// (Route).
//
// # Subpackages
//
//	program                tripod-wasm: its arguments, the start of a worker, the compiler
//	standalone             a component in a worker without a node, for tripod component test
//	codelayer              signed layers with compiled code, which an image brings along
//	artifact               components in OCI registries: built by tripod push, opened from the image store
//	internal/annotations   parses a pod's annotations about how its components are served
//	internal/code          compiles components, and keeps the machine code
//	internal/workers       keeps the workers and dialers: their start, cgroups, watch and end
//	internal/launch        starts tripod-wasm
//	internal/certificates  the node's certificate authority, and changes of certificates in mounts
//	internal/workerapi     the protocol between daemon and worker
//	internal/worker        the pods of a worker; runs guests with internal/component
//	internal/dataplane     requests: gRPC, gRPC-Web, Connect and HTTP, over HTTP/1.1 to HTTP/3
//	internal/h2            the HTTP/2 server of dataplane
//	internal/grpcclient    the outgoing gRPC calls of guests
//	internal/redis         pairs of wasi:keyvalue in a Redis server
//	internal/pairs         pairs of wasi:keyvalue on the node
//	internal/egress        which connections a guest can open, and the protocol between worker and dialer
//	internal/dialer        opens these connections in the pods' network namespaces; a process of its own
//	internal/lockdown      drops a worker's privileges
//	internal/requests      requests at addresses of the node
//	internal/collector     metrics of components for Prometheus
//
// Packages program, worker and grpcclient depend on the engine, so the daemon never imports them.
package wasm
