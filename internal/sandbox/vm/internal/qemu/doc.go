// Package qemu is the driver "qmp": it runs machines as QEMU processes that it starts itself.
//
//	Define ─▶ Root/NAME/machine.json
//	Start ──▶ state.json "starting" ─▶ sockets, files, taps opened by root ─▶ QEMU, as the pod's user, in the pod's cgroup
//	                                        inherited descriptors, no path of ours     │
//	          state.json pid + start time ◀───────────────────────────────────────────┘
//	          QMP greeting, status "running" ─▶ state.json "running"
//
//	             ┌─ QMP: SHUTDOWN, GUEST_PANICKED, status ─┐  QEMU stays, paused, until we have seen why
//	watch ───────┤                                         ├─▶ verdict in state.json ─▶ kill ─▶ state.json "ended" ─▶ Event
//	             └─ pidfd: the process has ended ──────────┘
//
// A daemon that is killed at any of these lines finds the machine by state.json (a PID with its start time and the boot
// in which they hold) or, when the PID was not written yet, by the mark on the command line of the processes in its
// cgroup. QEMU does not know whether we live: its sockets were made before it, wait for the next client, and a guest that
// powered off is kept, paused, with the reason.
//
// What QEMU may do is little, for guests break out of it: it runs as a user of the pod's own without capabilities, with
// no_new_privs, under its own seccomp filter, in empty network, IPC and UTS namespaces. Disks, kernel, log, taps and
// shared directories reach it as descriptors.
//
// The package knows machines, not pods, and must not import the backend, the image store or the network.
package qemu
