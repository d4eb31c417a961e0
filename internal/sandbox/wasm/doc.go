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
// <key> is the pod's ID where it is 64 hexadecimal digits, else the SHA-256 of it (names.go): the ID of a pod with a
// component name can be longer than a file name may be.
//
// What a container is doing is known by its worker, which keeps the end of a container until it is told to forget it. The
// files say what was ordered (created, started in which worker, exited), so that a daemon that was killed at any line can
// tell a container that never started from one whose worker died. They lie on a tmpfs and are not synced: with the page
// cache all that they speak of is gone.
//
// Compiled code is machine code that a worker will execute. It is loaded only when it is what this daemon wrote: the cache
// is closed to others, and each file is held against the checksum in its description before every load (faults I7). The
// compiler runs on foreign bytes and is a process of its own, without rights (faults I6).
//
// The package must not import the engine (it is pure Go), decide states (the node does), or answer requests of the data
// plane: they never pass through the daemon.
package wasm
