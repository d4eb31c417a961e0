// Package notifier reports the system calls that a container's seccomp profile forbids (seccomp_unotify(2)).
//
//	container ── forbidden call ─▶ kernel ── notification ─▶ Listener ─▶ Handler (log, count, stop)
//	          ◀──── EPERM ────────        ◀──── EPERM ──────
//
// Apply changes a profile so that the kernel notifies the listener instead of failing the call. The OCI runtime passes
// the kernel's descriptor to the Listener's socket when it starts the container. The call fails in the container as it
// would without the notifier.
//
// The descriptor ends with the process that holds it, which is the daemon: after a restart of the daemon, forbidden
// calls fail with ENOSYS and nobody is notified. The package must not allow a call.
package notifier
