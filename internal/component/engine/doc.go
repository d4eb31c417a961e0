// Package engine runs guests: WebAssembly components and preview-1 modules, in wasmtime (its C API, reached by cgo).
// It knows types, flat values (internal/component/wit) and limits; it knows neither pods nor gRPC, HTTP or protobuf.
//
//	bytes of a guest ──Compile (child process)──► code image ──Load──► Code ──Instantiate──► Instance ──Call, Run──►
//	                                                                    └─Func (types checked once)───────┘
//
// # Two paths
//
// A call takes flat bytes and gives flat bytes, with one crossing from Go to C. Below that there are two ways, and a test
// holds them to the same answers:
//
//   - the component path: wasmtime's component API with dynamic values. Always right; slow for long lists.
//   - the core path: the component's main core module alone, with the canonical ABI spoken in C on its linear memory
//     (GB/s for list<u8>). It is taken where the component has the shape that the usual tools give it: the first core
//     module is the guest, all others were made by wit-component, and the guest imports only WASI preview 1 and
//     interfaces of ours. [InstanceOptions].Path can force one of the two.
//
// # What bounds a guest
//
//   - time: an epoch tick every 10 ms while guests run. At a tick the guest's own thread looks whether it has been killed
//     (the context of its call has ended, or [Instance.Kill]) or has used up its compute budget
//     ([InstanceOptions].Deadline). Waiting is not computing: what a host call takes beyond 1 ms is not counted, nor
//     what a guest sleeps (but while it is instantiated), and [HostCall.Renew] gives a fresh budget. A guest that runs longer than a tick stands back until
//     its call (or a host call) ends, so that it does not move the latency of others: its thread is scheduled as
//     SCHED_IDLE, or, where the process may not undo that, sleeps whenever others want the processor.
//   - memory: bytes of each linear memory, elements of each table, live resource handles, host calls of a call; and
//     the sum over a pod's instances, in an [Account], which also holds the pod's CPU quota, and bounds what its guests
//     hold of the worker: open files, resources, and what the host keeps for these.
//   - stack: 512 KiB; deeper recursion is a trap.
//
// # WASI
//
// Guests of preview 1 have one of our own (p1.c): it costs nothing until it is called, a guest that waits in it can be
// killed, and what it opens is counted ([Account.Bound]). What concerns directories and files is passed on to the engine's.
// On the component path WASI is what the host offers, and the engine's for what it does not: a guest that is killed while
// it waits there is left behind, and released when it wakes up.
//
// Modules with channels ([InstanceOptions].Channels) find them in the directory /ch:
//
//	guest ──fd_read, fd_write──► p1.c ──/ch/NAME──► p1channel.c ──► Channel.Receive, Send
//	                              ├─► standard streams    └─ waits here, on a futex, until Channel calls wake
//	                              └─► p1pass.c ──► the engine's, for directories and files
//
// A channel's methods never wait; the guest's thread does, in C, holding nothing of Go's. A guest that sends or gets messages
// does not stand back meanwhile, but only when it has computed for two ticks without any.
//
// An instance whose call did not return normally is dead: every further call is refused.
//
// # What it must not do
//
// The daemon never imports this package: guests run in worker processes. No function here is told what a digest or an
// image is, and it never reads or writes files other than the directories a guest is given.
package engine
