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
// A domain has all devices of the machine except its network. Its disks, kernel and shares are placeholders in Dir, and
// its console and channels are null devices. The wrapper (internal/sandbox/vm/vmwrap) replaces all of these with
// descriptors. So, as with the driver qmp, QEMU opens no files, and libvirt's settings for owners, labels, logs and
// path lengths have no effect.
//
// The driver recognizes a power-off by the reason that libvirt reports for the end of the domain. After a guest's
// panic, the domain stays crashed until the driver has noticed the crash. libvirt.json holds what libvirt forgets when
// it restarts.
//
// The package knows machines, not pods, and must not import the backend, the image store or the network.
package libvirt
