// Package share gives a machine directories of the node: by virtio-fs, for which it runs virtiofsd, or, for virtio-9p, as
// a descriptor that QEMU serves itself.
//
//	                 Open: a clone of the mounts at the path, nowhere mounted, read-only where it shall be
//	directory ──────▶ │
//	                  ├─▶ 9p: QEMU inherits the descriptor
//	                  └─▶ Start: virtiofsd, one for each share
//	                        thread with a mount namespace of its own, where the clone is mounted
//	                          └▶ virtiofsd: its user and PID namespaces, the pod's cgroup ◀── socket ──▶ QEMU
//
// virtiofsd serves one connection and ends with it, so that none outlives its machine, nor a daemon that was killed before
// there was one. The other way round a guest whose virtiofsd has ended waits for its files for ever: QEMU (7.2) cannot be
// given another one. So the driver ends that machine and says why (Servers.Watch).
//
// Owners. In virtiofsd's user namespace the pod's user is root, and all other users are themselves; on the clone the files
// of root are that user's. So the guest's root, which virtiofsd acts as, is root for the files of the share, and virtiofsd
// is root for nothing else: the node's root is no user of its namespace. A file system that maps no owners is served by a
// virtiofsd whose root is the node's, with capabilities in its own user namespace only.
//
// The package must not know drivers, nor what a share is for.
package virtiofsd
