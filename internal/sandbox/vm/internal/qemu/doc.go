// Package qemu is the driver "qmp": it runs machines as QEMU processes that it starts itself.
//
//	Define ─▶ Root/NAME/machine.json
//	Start ──▶ state.json "starting" ─▶ sockets, files, taps opened by root ─▶ QEMU, as the pod's user, in the pod's cgroup
//	                                        inherited descriptors instead of paths     │
//	          state.json pid + start time ◀───────────────────────────────────────────┘
//	          QMP greeting, status "running" ─▶ state.json "running"
//
//	             ┌─ QMP: SHUTDOWN, GUEST_PANICKED, status ─┐  QEMU stays, paused, until the reason is read
//	watch ───────┤                                         ├─▶ verdict in state.json ─▶ kill ─▶ state.json "ended" ─▶ Event
//	             └─ pidfd: the process has ended ──────────┘
//
// The daemon can be killed at any point of this diagram. The next daemon finds the machine by state.json, which holds
// the PID, its start time and the boot ID. If the PID was not written yet, the next daemon searches the machine's
// cgroup for a process whose command line names the machine. QEMU does not depend on the daemon. It inherits listening
// sockets, which accept the next client. After the guest has powered off, QEMU stays paused, so that the reason can be
// read later.
//
// A guest might break out of QEMU, so QEMU has few rights. It runs as the pod's own user without capabilities, with
// no_new_privs, under its own seccomp filter, in empty network, IPC and UTS namespaces. It inherits disks, kernel, log,
// taps and shared directories as descriptors.
//
// The package knows machines, not pods, and must not import the backend, the image store or the network.
package qemu
