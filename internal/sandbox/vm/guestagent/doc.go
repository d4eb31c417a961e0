// Package guest is what tripod-agent does in a virtual machine: it serves the host's requests over a virtio-serial port.
//
//	/dev/vportNpM ──▶ Server ──▶ session (one at a time) ──▶ job: program | connection | report
//	                    │                                      each on a stream of its own
//	                    └── the host is gone, or another session begins: all jobs are killed
//
// The guest trusts its host, which can do what it likes with it anyway. It must not import net, encoding/json or the rest of
// Tripod: the program is to be small, for it is copied into guests that have little memory.
package guestagent
