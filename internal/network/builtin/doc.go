// Package builtin implements the reference CNI plugins bridge (with host-local), loopback and portmap in this process.
// That saves starting four programs for a pod's ADD, which then takes less than a millisecond of CPU time.
//
//	libcni ─► pluginExec ─► Plan(path, stdin, environment) ─┬─► *Call ─► Run: the result, as the plugin prints it
//	                                                        └─► reason ─► the executable runs
//
// A Call and the executable make the same network: the same interfaces, addresses, routes and sysctls, and the same
// leases in host-local's files, under host-local's lock. So a Call can undo an ADD by the executable and vice versa,
// and both can serve pods of one network at the same time.
//
// Plan accepts an execution only if this package implements all of it:
//   - The command is ADD or DEL. CHECK, STATUS, GC and VERSION need no speed, because they delay no pod, and their
//     answers are worth more if they come from a second implementation.
//   - The configuration has version 1.0.0 or older, and only fields and arguments that are implemented here (config.go).
//   - The executable is a build of the reference plugin (reference.go). If the node's owner has replaced it, the
//     replacement runs.
//
// The package knows nothing about pods, records or chains. Between calls it only remembers which executables are
// reference plugins. After its context ends, Run returns as soon as the current kernel request is done. That can take a
// while, so the caller must not count on a prompt return (see internal/network).
package builtin
