// Package builtin does in this process what the reference CNI plugins bridge (with host-local), loopback and portmap
// would do as processes of their own: a pod's ADD costs less than a millisecond of our time instead of four starts of
// programs.
//
//	libcni ─► pluginExec ─► Plan(path, stdin, environment) ─┬─► *Call ─► Run: the result, as the plugin prints it
//	                                                        └─► why not ─► the executable is run
//
// It is the same network, whoever made it: the same interfaces, addresses, routes and sysctls; the leases are
// host-local's files below its lock. So a pod that was added here may be deleted by the executable and the other way
// round, and both may serve pods of one network at the same time.
//
// Plan says yes only to what is done here in every detail:
//   - ADD and DEL. CHECK, STATUS, GC and VERSION are in no pod's way, and what they tell is worth more from a second
//     implementation.
//   - Configurations up to version 1.0.0 with no field and no argument that is not known here (config.go). An unknown
//     field, or a value that asks for something which is not done here, goes to the executable.
//   - Where the executable that would be run is a build of the reference plugin (reference.go): a node's owner who
//     has put something else in its place gets that.
//
// The package knows nothing of pods, records or chains, and keeps nothing between calls but what it has learnt of
// executables. A Call looks at its context wherever it may wait, but not while the kernel works on a request: its
// caller must count on a Run that returns late (see internal/network).
package builtin
