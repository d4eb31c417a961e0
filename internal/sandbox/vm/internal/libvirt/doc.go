// Package libvirt is the driver "libvirt": it runs machines as domains of a libvirtd.
//
//	Define ─▶ domain XML ─────RPC────▶ libvirtd     the definition and our mark are the domain's <metadata>
//	Start ──▶ files, sockets, taps opened by root
//	      ──▶ DomainCreate ───RPC────▶ libvirtd ─exec─▶ tripod-vmwrap (the pod's user) ─exec─▶ QEMU
//	          tap service ◀─name, secret─────────────────────┘   ▲
//	              └──pod's cgroup, descriptors───────────────────┘
//
//	watch ◀── lifecycle events, a query of every domain after a reconnect, the process's pidfd
//	   └─▶ reason from libvirt ─▶ StateDir/libvirt.json ─▶ Event
//
// A domain has all of the machine's devices except its network. Placeholders in Dir stand for disks, kernel and shares, null
// devices for console and channels, and the wrapper replaces them by descriptors (internal/sandbox/vm/vmwrap). So QEMU opens
// nothing by itself, as with the driver qmp, and libvirt's settings for owners, labels, logs and the length of paths do not
// matter.
//
// The reason that libvirt gives for a domain's end shows a power-off. A domain that panicked is kept, crashed, until the driver
// has seen it. libvirt.json holds what libvirt forgets when it restarts.
//
// The package knows machines, not pods, and must not import the backend, the image store or the network.
package libvirt
