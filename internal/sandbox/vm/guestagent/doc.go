// Package guestagent is tripod-agent, which runs in a virtual machine and serves the host over a virtio-serial port. Begin
// with Run.
//
//	/dev/vportNpM ──▶ server ──▶ session (one at a time) ──▶ job: program | connection | report
//	                    │                                      each on a stream of its own
//	                    └── the host has left, or another session begins: all jobs are killed
//
// The guest trusts its host, which controls it in any case. The package must not import fmt, net or encoding/json, nor
// more of Tripod than the protocol: the program is copied into guests that have little memory.
package guestagent
