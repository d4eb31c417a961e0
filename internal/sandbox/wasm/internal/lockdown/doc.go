// Package lockdown takes from the Wasm worker what it does not need, before any guest runs: the node's file systems
// (Isolate), root (Drop) and most system calls (Restrict). Each holds for the whole process, all its threads included, and
// cannot be undone.
//
//	started by the daemon as root, in mount, PID, IPC, UTS and network namespaces of its own (control.Namespaces)
//	  │ Isolate    the root is an empty read-only tmpfs with /proc: nothing to see, and no mount of the node is pinned
//	  │ Drop       own user and group, no other groups, no capabilities
//	  │ Restrict   no new privileges; system calls of the allow-list only
//	  ▼
//	guests run
//
// A guest is held by the engine; this is for the day on which the engine has a hole. What is left to a process that has
// broken out: descriptors of the worker's own pods, its memory, and threads to compute with. Workers are of one user, but
// the PID namespace leaves no name for another: it can neither be signalled nor traced, slowed or seen.
//
// The package must not know what the worker does beyond the system calls that it makes.
package lockdown
