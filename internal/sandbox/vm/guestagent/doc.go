// Package guestagent implements tripod-agent, which serves the host over a virtio-serial port. Begin with Run.
//
//	/dev/vportNpM ──▶ server ──▶ session (one at a time) ──▶ job: program | connection | report
//	                    │                                      each on its own stream
//	                    └── the host leaves, or another session begins: all jobs are killed
//
// The guest trusts its host, which controls the guest in any case. The package must not import fmt, net, encoding/json,
// or any package of Tripod except the protocol and identity, because the program must be small enough for guests with little memory.
package guestagent
