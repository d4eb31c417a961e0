// Package engine runs guests: WebAssembly components and preview-1 modules, in wasmtime (through cgo and its C API). It knows
// types, flat values (internal/component/wit) and limits, but neither pods nor gRPC, HTTP or protobuf. Begin with [New]; the
// example of package internal/component shows the whole way.
//
//	bytes of a guest ──Compile (child process)──► code image ──Load──► Code ──Instantiate──► Instance ──Call, Run──►
//	                                                                    └─Func (types checked once)───────┘
//
// # Two paths
//
// A call takes flat bytes and returns flat bytes, with one crossing from Go to C. Below that there are two paths, and a test
// checks that both give the same answers:
//
//   - the component path: wasmtime's component API with dynamic values. It works for every component and is slow for long lists.
//   - the core path: the component's main core module alone, with the canonical ABI implemented in C on its linear memory
//     (GB/s for list<u8>). It is used for components of the shape that the usual tools produce: the first core module is the
//     guest, wit-component made all others, and the guest imports only WASI preview 1 and interfaces of the [Host].
//     [InstanceOptions].Path can force one of the two.
//
// # What bounds a guest
//
//   - time: an epoch tick every 10 ms while guests run. At a tick the guest's own thread checks whether it has been killed
//     (the context of its call has ended, or [Instance.Kill]) or has used up its compute budget
//     ([InstanceOptions].Deadline). Waiting is not computing: the part of a host call beyond 1 ms does not count, nor does
//     a guest's sleep (except during instantiation), and [HostCall.Renew] grants a fresh budget. A guest that runs longer
//     than a tick yields to others until its call (or a host call) ends: its thread is scheduled as SCHED_IDLE or, where the
//     process may not undo that, sleeps whenever other threads want the processor.
//   - memory: bytes of each linear memory, elements of each table, live resource handles, host calls of a call. An [Account]
//     adds these up over several instances. It also has their CPU quota, and bounds the open files and resources that they
//     hold and what the host keeps for them.
//   - stack: 512 KiB; deeper recursion is a trap.
//
// # WASI
//
// Guests of preview 1 have a WASI of this package (p1.c): it costs nothing until it is called, a guest that waits in it can be
// killed, and what it opens is counted ([Account.Bound]). It forwards calls on directories and files to wasmtime's. On the
// component path WASI is what the host offers, and wasmtime's for the rest. A guest that is killed while it waits in
// wasmtime's is left behind, and released when it wakes up.
//
// Modules with channels ([InstanceOptions].Channels) find them in the directory /ch:
//
//	guest ──fd_read, fd_write──► p1.c ──/ch/NAME──► p1channel.c ──► Channel.Receive, Send
//	                              ├─► standard streams    └─ waits here, on a futex, until Channel calls wake
//	                              └─► p1pass.c ──► the engine's, for directories and files
//
// A channel's methods never wait; the guest's thread does, in C, and holds nothing of Go's. A guest that sends or receives
// messages yields to others only after it has computed for two ticks without any.
//
// An instance whose call did not return normally is dead: it refuses all further calls.
//
// # What it must not do
//
// Guests run in worker processes: the daemon never imports this package. The package knows no digests and no OCI images, and it
// touches no files but those in the directories that a guest gets.
package engine
