// Package vmwrap is what tripod-vmwrap does: the program that libvirt takes for QEMU.
//
//	libvirtd ─exec─▶ tripod-vmwrap ──Request (name, secret)──▶ tap.sock, the driver "libvirt" in the daemon
//	                      │        ◀──Grant + descriptors────
//	                      └─exec─▶ QEMU, with the command line changed by edit
//
// A domain names its disks, kernel and shares by placeholders, its console and channels are null devices, and it has no
// network. The wrapper puts the descriptors in their places, so that QEMU, which runs as the pod's user, opens nothing by
// itself. Without a machine's name in its environment, as libvirt asks QEMU for what it can do, the wrapper is just QEMU.
//
// The package runs without rights. It must not decide anything: what a machine may have is the daemon's business.
package vmwrap
