// Package vmwrap implements tripod-vmwrap, the program that libvirt executes in place of QEMU.
//
//	libvirtd ─exec─▶ tripod-vmwrap ──Request (name, secret)──▶ tap.sock, the driver "libvirt" in the daemon
//	                      │        ◀──Grant + descriptors────
//	                      └─exec─▶ QEMU, with the command line changed by edit
//
// A domain has placeholders for its disks, kernel and shares, null devices for its console and channels, and no
// network. The wrapper replaces the placeholders and null devices with descriptors and adds the network. QEMU needs
// descriptors, because it runs as the pod's user and opens no files. Without a machine's name in its environment, for
// example when libvirt probes QEMU's capabilities, the wrapper executes QEMU unchanged.
//
// The wrapper runs without privileges and decides nothing; the daemon decides what a machine gets.
package vmwrap
