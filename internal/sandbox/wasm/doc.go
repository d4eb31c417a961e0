// Package wasm runs unit pods whose one container is a WebAssembly component. The daemon's part is here: it finds and
// compiles the component, opens the pod's sockets, its log and its mounts, and hands all of that to a worker process
// (tripod-wasm), which runs the guest and answers the network.
//
//	node ──▶ Backend                                    <Root>/                       survives a reboot
//	           │ CreateContainer                            cache/<digest>/<engine>.{code,json}
//	           │   artifact ─▶ cache ─▶ compile (a child)   ca.crt  ca.key
//	           │   worker: Load
//	           │ StartContainer                          <RunDir>/                     gone after a reboot
//	           │   sockets in the pod's netns               pods/<key>/{pod,container}.json
//	           │   log file · mounts · certificate          workers/<name>/{control,data}.sock  log  worker.json
//	           ▼   one message, with descriptors
//	         keeper ──control.sock──▶ tripod-wasm worker    outlives the daemon; owns sockets, streams, guests
//	           │ pidfd and connection: the two witnesses of a worker's end
//	           └─ one per node, per namespace or per pod
//
// <key> is the pod's ID if that is 64 hexadecimal digits, otherwise its SHA-256 (names.go): the ID of a pod with a
// component name can be longer than a file name may be.
//
// A container's worker knows what the container is doing, and remembers its exit until the daemon removes it. The files
// say what was ordered (created, started in which worker, exited), so that a daemon that was killed at any line can
// tell a container that never started from one whose worker died. They are on a tmpfs and are not synced: a crash that
// loses the page cache ends the workers as well.
//
// Compiled code is machine code that a worker will execute. A worker loads only what this daemon wrote: the cache is
// closed to others, and each file is compared with the checksum in its description before every load (faults I7). The
// compiler reads foreign bytes, so it is a process of its own, without rights (faults I6).
//
// The package must not import the engine (it is pure Go), decide states (the node does), or answer requests of the data
// plane: they never pass through the daemon. (Requests at the node's own addresses do, see Route.)
//
// # The kind's other packages
//
//	program               tripod-wasm: its arguments, the start of a worker, the compiler
//	artifact              components in OCI registries: what tripod push writes, what an image has
//	internal/workerapi    the protocol between daemon and worker
//	internal/worker       the pods of a worker; runs guests with internal/component
//	internal/dataplane    requests: gRPC, gRPC-Web, Connect and HTTP, over HTTP/1.1 to HTTP/3
//	internal/lockdown     the rights that a worker gives up
//	internal/router       requests at addresses of the node
//	internal/collector    figures of components for Prometheus
//
// Packages program and worker contain the engine, so the daemon never imports them.
package wasm
