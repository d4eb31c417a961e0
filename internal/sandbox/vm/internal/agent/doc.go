// Package agent is the host's side of tripod-agent. That program runs in a guest and does what a hypervisor cannot:
// exec, connections to the guest's localhost, and statistics that only the guest knows. Begin with Agent.
//
//	internal/sandbox/vm ──▶ Agent ══ agent.sock ══ QEMU ══ virtio-serial ══ tripod-agent (internal/sandbox/vm/guestagent)
//	                 │        one permanent connection, with sessions and streams (…/agent/wire)
//	                 └─ QGA   for ExecSync only, if the image runs qemu-guest-agent instead
//	Disk ──▶ an ISO image with the program, labelled TRIPODAGENT, which every machine gets as a disk
//
// An Agent connects on its own, and reconnects after QEMU, the guest or the guest's agent has restarted. A program in
// the guest ends when the session that started it ends, and therefore also when the daemon ends.
//
// Input from the guest is not trusted: wire bounds frames, windows and streams, and this package limits the length of
// texts. The package must not know about pods or containers.
//
// # Subpackages
//
//	wire   the protocol with the guest: frames on one byte stream, and streams in the frames
package agent
