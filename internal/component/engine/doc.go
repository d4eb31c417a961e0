// Package engine runs guests: WebAssembly components and WASI preview 1 modules, in wasmtime (through its C API, with
// cgo). The package handles types, flat values (internal/component/wit) and limits, but not pods, gRPC, HTTP or
// protobuf. Begin with [New]; the example of package internal/component shows all the steps.
//
//	bytes of a guest ──Compile (child process)──► code image ──Load──► Code ──Instantiate──► Instance ──Call, Run──►
//	                                                                    └─Func (types checked once)───────┘
//
// # Two paths
//
// A call passes flat bytes and returns flat bytes, with one crossing from Go to C. There are two paths for a call, and
// a test checks that both give the same results:
//
//   - the component path: wasmtime's component API with dynamic values. It works for every component. Long lists are slow.
//   - the core path: the component's core modules, with the canonical ABI implemented in C on their linear memory (GB/s
//     for list<u8>). A plan ([wasmbin.Plan]) makes one module of them; it exists for components that common tools
//     make from one program, and which may import only interfaces of the [Host]. If the first core module is the guest,
//     and imports only WASI preview 1 and interfaces of the [Host], it is used alone, with preview 1 by the engine.
//     [InstanceOptions].Path can force either path.
//
// # Limits
//
//   - time: an epoch tick every 10 ms while guests run. At each tick, the guest's own thread checks whether the guest
//     has been killed (its call's context has ended, or [Instance.Kill] was called) or has used up its compute budget
//     ([InstanceOptions].Deadline). Except during instantiation, waiting does not use up the budget: sleep does not
//     count, and host calls of more than 1 ms do not count. [HostCall.Renew] grants a fresh budget. A guest that runs
//     longer than a tick yields to others until its call ends or gets a fresh budget. It never yields in host
//     functions. To yield, its thread is scheduled as SCHED_IDLE. If the process has no permission to undo SCHED_IDLE,
//     the thread instead sleeps whenever other threads want the processor.
//   - memory: bytes of each linear memory, elements of each table, live resource handles, host calls per call. An
//     [Account] sums memory over several instances, with what they take beside it. It also holds their CPU quota, and limits
//     their open files, their resources and the bytes that the host keeps for them.
//   - stack: 512 KiB; deeper recursion traps.
//
// # WASI
//
// This package has its own WASI for preview 1 guests (p1.c). This WASI costs nothing until called, and counts what the
// guest opens ([Account.Bound]). A guest that waits in it can be killed. This WASI forwards calls on directories and
// files to wasmtime's WASI. For each interface of WASI, components get the host's implementation if there is one,
// otherwise wasmtime's. A guest that is killed while it waits in wasmtime's WASI is abandoned, and released when it
// wakes up.
//
// Modules with channels ([InstanceOptions].Channels) find them in the directory /ch:
//
//	guest ──fd_read, fd_write──► p1.c ──/ch/NAME──► p1channel.c ──► Channel.Receive, Send
//	                              ├─► standard streams    └─ waits here, on a futex, until Channel calls wake
//	                              └─► p1pass.c ──► wasmtime's WASI, for directories and files
//
// A channel's methods never wait. The guest's thread waits in C, and meanwhile occupies nothing of the Go runtime. A
// guest that sends or receives messages yields to others only after computing for two ticks without a message.
//
// # Errors
//
// An instance whose call did not return normally is dead: it refuses all further calls.
//
// # What it must not do
//
// Guests run in worker processes: the daemon never imports this package. The package knows nothing about digests or OCI
// images, and touches no files outside a guest's directories.
package engine
