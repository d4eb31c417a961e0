// Package guestnode runs the containers of a pod in the guest of the pod's machine. It is the part of tripod-guest that
// serves the daemon's calls (package guestapi), and the host of a sandbox.Backend, which is the same one that runs
// containers on a node.
//
//	daemon ══ virtio-serial ══ guestagent ── Service ──▶ Node ──▶ Backend ──▶ crun, conmon
//	                                                      ├─ images: EROFS disks at a SCSI controller, overlays on the scratch disk
//	                                                      ├─ network: the pod's addresses on the machine's interfaces
//	                                                      └─ logs: conmon's files, until the daemon has them
//
// The guest belongs to the pod, so nothing in it is secret from the pod, and nothing that it says is trusted by the node.
package guestnode
