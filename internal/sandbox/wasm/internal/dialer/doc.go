// Package dialer opens the connections of component pods, in a process of its own: `tripod-wasm dialer`. One dialer
// serves the pods of all workers. It outlives the daemon, so pods can call out while the daemon is away.
//
//	daemon ──Order──► control socket ─► Server ─► pod: rules, DNS, network namespace
//	worker ──Request──► the pod's socket pair ─────┘ resolve ─► compare with the rules ─► connect ─► socket to the worker
//
// A pod lasts until the worker closes its end of the pair: when the pod or the worker ends. A dialer without pods ends
// after a while, and the daemon starts another one when it needs one.
//
// The process runs without root. It has CAP_SYS_ADMIN, because setns needs it (setns(2)), an empty file system, an empty
// network namespace of its own, and a list of allowed system calls (package lockdown). It trusts the daemon and no
// worker: requests are bounded in size, number and rate.
package dialer
