// Package qemu is the driver "qmp": it runs machines as QEMU processes that it starts itself.
//
//	Define ─▶ Root/NAME/machine.json
//	Start ──▶ state.json "starting" ─▶ sockets, files, taps opened by root ─▶ QEMU, as the pod's user, in the pod's cgroup
//	                                        inherited descriptors, no path of ours     │
//	          state.json pid + start time ◀───────────────────────────────────────────┘
//	          QMP greeting, status "running" ─▶ state.json "running"
//
//	             ┌─ QMP: SHUTDOWN, GUEST_PANICKED, status ─┐  QEMU stays, paused, until the reason is read
//	watch ───────┤                                         ├─▶ verdict in state.json ─▶ kill ─▶ state.json "ended" ─▶ Event
//	             └─ pidfd: the process has ended ──────────┘
//
// A daemon that is killed at any of these lines finds the machine again by state.json (a PID with its start time and boot) or,
// if the PID was not written yet, by the mark on the command line of the processes in its cgroup. QEMU does not depend on the
// daemon: its sockets were made before it and wait for the next client, and a guest that has powered off is kept, paused, with
// the reason.
//
// QEMU has few rights, since a guest may break out of it. It runs as a user of the pod's own without capabilities, with
// no_new_privs, under its own seccomp filter, in empty network, IPC and UTS namespaces. It gets disks, kernel, log, taps and
// shared directories as descriptors.
//
// The package knows machines, not pods, and must not import the backend, the image store or the network.
package qemu
