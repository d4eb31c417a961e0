// Package lockdown takes from a Wasm worker its access to the node's file systems (Isolate), its root privileges (Drop)
// and most system calls (Restrict), before any guest runs. Each step applies to all threads of the process and cannot
// be undone.
//
//	started by the daemon as root, in new mount, PID, IPC, UTS and network namespaces (workerapi.Namespaces)
//	  │ Isolate    the root is an empty read-only tmpfs with /proc; no mount of the node is visible or pinned
//	  │ Drop       the worker's user and group, no supplementary groups, no capabilities
//	  │ Restrict   no new privileges; only the system calls of the allow-list
//	  ▼
//	guests run
//
// The engine confines guests; this package limits the damage if the engine has a vulnerability. A guest that escapes
// from the engine can still use CPU time, the worker's memory, and the file descriptors of the worker's pods. All
// workers run as the same user, but each has its own PID namespace, so a worker can neither see, signal, trace nor slow
// another worker.
//
// Only the list of allowed system calls depends on what the worker does.
package lockdown
