// Package machine is what the VM backend and the hypervisor drivers have in common: the definition of a virtual machine,
// and the Driver that runs one.
//
//	internal/sandbox/vm ──Definition──▶ Driver ──▶ QEMU
//	     ▲                       │          qmp:     internal/sandbox/vm/internal/qemu, spawned by us
//	     └──────── Event ────────┘          libvirt: internal/sandbox/vm/internal/libvirt, spawned by libvirtd through tripod-vmwrap
//
// A driver knows machines, not pods: all that it needs is in the Definition, and it decides nothing about a pod's state.
// The package must not import a driver, nor the network or the image store.
package machine
