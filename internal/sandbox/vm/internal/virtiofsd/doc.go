// Package virtiofsd shares directories of the node with a machine: by virtio-fs, for which it runs virtiofsd, or by virtio-9p, as
// a descriptor that QEMU serves itself.
//
//	                 Open: a clone of the mounts at the path, mounted nowhere, read-only if asked for
//	directory ──────▶ │
//	                  ├─▶ 9p: QEMU inherits the descriptor
//	                  └─▶ Start: virtiofsd, one for each share
//	                        thread with a mount namespace of its own, where the clone is mounted
//	                          └▶ virtiofsd: its user and PID namespaces, the pod's cgroup ◀── socket ──▶ QEMU
//
// virtiofsd serves one connection and ends with it, so it outlives neither its machine nor a daemon that was killed before the
// machine started. A guest whose virtiofsd has ended waits for its files for ever, since QEMU (7.2) cannot connect to another.
// The driver ends such a machine and reports why (Servers.Watch).
//
// Owners. In virtiofsd's user namespace the pod's user is root, and all other users are themselves. On the clone the files of
// root belong to the pod's user. So the guest's root, which virtiofsd acts as, is root for the files of the share and for
// nothing else: the node's root does not exist in the namespace. A file system that cannot map owners is served by a virtiofsd
// whose root is the node's, with capabilities in its own user namespace only.
//
// The package must not know the drivers or what a share is for.
package virtiofsd
