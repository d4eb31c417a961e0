// Package libvirt is the driver "libvirt": it runs machines as domains of a libvirtd.
//
//	Define ─▶ domain XML ─────RPC────▶ libvirtd     the definition and our mark are the domain's <metadata>
//	Start ──▶ files, sockets, taps opened by root
//	      ──▶ DomainCreate ───RPC────▶ libvirtd ─exec─▶ tripod-vmwrap (the pod's user) ─exec─▶ QEMU
//	          tap service ◀─name, secret─────────────────────┘   ▲
//	              └──pod's cgroup, descriptors───────────────────┘
//
//	watch ◀── lifecycle events, a look at every domain after a reconnect, the process's pidfd
//	   └─▶ reason from libvirt ─▶ StateDir/libvirt.json ─▶ Event
//
// A domain has all of the machine's devices but its network: disks, kernel and shares are named by placeholders in Dir,
// console and channels are null devices, and the wrapper puts descriptors in their places (internal/sandbox/vm/vmwrap). So QEMU
// opens nothing by itself, as with the driver qmp, and libvirt's settings about owners, labels, logs and the length of
// paths do not matter.
//
// A guest that powers off is told by libvirt's reason for the end; one that panics is kept, crashed, until we have seen
// it. What libvirt forgets when it is restarted is in libvirt.json, once we know.
//
// The package knows machines, not pods, and must not import the backend, the image store or the network.
package libvirt
