// Package machine is the contract between the backend and the hypervisor drivers: the Definition of a virtual machine,
// and the Driver that runs it.
//
//	internal/sandbox/vm ──Definition──▶ Driver ──▶ QEMU
//	     ▲                       │          qmp:     internal/sandbox/vm/internal/qemu, started by the daemon
//	     └──────── Event ────────┘          libvirt: internal/sandbox/vm/internal/libvirt, started by libvirtd through tripod-vmwrap
//
// A driver knows machines, not pods. The Definition contains everything that the driver needs. The driver decides
// nothing about a pod's state. The package must not import a driver, the network or the image store.
package machine
