// Package agent is the host's side of tripod-agent, the program that runs in a guest and does there what a hypervisor cannot:
// exec, connections to the guest's localhost, the guest's own figures.
//
//	internal/sandbox/vm ──▶ Agent ══ agent.sock ══ QEMU ══ virtio-serial ══ tripod-agent (internal/sandbox/vm/guestagent)
//	                 │        one connection, kept; the sessions and streams on it are internal/sandbox/vm/internal/agent/wire
//	                 └─ QGA   for ExecSync only, where the image brings qemu-guest-agent instead
//	Disk ──▶ an ISO image labelled TRIPODAGENT with the program, which every machine gets as a disk
//
// An Agent needs no care: it connects when there is something to connect to, and again when QEMU, the guest or its agent
// started anew. A program that runs in the guest ends with the session that it was started in, so also with the daemon.
//
// What comes from the guest is not trusted: frames, windows and streams are bounded by wire, reports here. The package knows no
// pod and no container.
package agent
