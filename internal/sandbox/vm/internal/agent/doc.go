// Package agent is the host's side of tripod-agent, the program that runs in a guest and does there what a hypervisor cannot:
// exec, connections to the guest's localhost, the guest's own figures.
//
//	internal/sandbox/vm ──▶ Agent ══ agent.sock ══ QEMU ══ virtio-serial ══ tripod-agent (internal/sandbox/vm/guestagent)
//	                 │        one connection, kept; the sessions and streams on it are internal/sandbox/vm/internal/agent/wire
//	                 └─ QGA   for ExecSync only, where the image brings qemu-guest-agent instead
//	Disk ──▶ an ISO image labelled TRIPODAGENT with the program, which every machine gets as a disk
//
// An Agent connects by itself, and again when QEMU, the guest or its agent has restarted. A program in the guest ends with the
// session that started it, and so with the daemon.
//
// Input from the guest is not trusted: wire bounds frames, windows and streams, this package bounds reports. It must not know
// pods or containers.
package agent
