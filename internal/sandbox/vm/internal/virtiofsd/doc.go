// Package virtiofsd shares directories of the node with a machine, over virtio-fs or virtio-9p. For virtio-fs, the
// package runs virtiofsd. For virtio-9p, QEMU inherits a descriptor.
//
//	                 Open: a detached clone of the mounts at the path, read-only if requested
//	directory ──────▶ │
//	                  ├─▶ 9p: QEMU inherits the descriptor
//	                  └─▶ Start: one virtiofsd for each share
//	                        thread with its own mount namespace, where the clone is mounted
//	                          └▶ virtiofsd: its user and PID namespaces, the pod's cgroup ◀── socket ──▶ QEMU
//
// A virtiofsd serves one connection and ends when that connection is closed. So it outlives neither its machine nor a
// daemon that dies before the machine starts. If a virtiofsd ends early, its guest would wait for files forever,
// because QEMU (7.2) cannot connect to a new virtiofsd. The driver therefore kills the machine and reports the reason
// (Servers.Watch).
//
// In virtiofsd's user namespace, the pod's user is root, and all other users are unchanged. On the clone, the pod's
// user owns the files of root. So virtiofsd, which acts for the guest's root, is root only for the files of the share;
// the node's root does not exist in the namespace. If the file system cannot map owners, virtiofsd's root is the node's
// root, but has capabilities only in virtiofsd's own user namespace.
//
// The package knows neither the drivers nor the purpose of a share.
package virtiofsd
