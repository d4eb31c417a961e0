// Package lockdown takes from the Wasm worker what it does not need, before any guest runs: the node's file systems
// (Isolate), root (Drop) and most system calls (Restrict). Each holds for the whole process, all its threads included, and
// cannot be undone.
//
//	started by the daemon as root, in mount, PID, IPC, UTS and network namespaces of its own (workerapi.Namespaces)
//	  │ Isolate    the root is an empty read-only tmpfs with /proc: nothing to see, and no mount of the node is pinned
//	  │ Drop       own user and group, no other groups, no capabilities
//	  │ Restrict   no new privileges; system calls of the allow-list only
//	  ▼
//	guests run
//
// The engine confines guests; this package limits the damage if the engine has a hole. A guest that breaks out still has the
// descriptors of the worker's own pods, the worker's memory, and threads to compute with. All workers run as one user, but
// each has a PID namespace: it can neither signal, trace, slow nor see another.
//
// The package must not know what the worker does beyond the system calls that it makes.
package lockdown
