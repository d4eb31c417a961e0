// Package vm runs unit pods. The single container of such a pod is a virtual machine. The container's image holds the
// machine's disk or kernel. The package combines the image, the pod's network, cloud-init, the console and the guest's
// agent into a definition. A driver (internal/sandbox/vm/internal/machine) runs the machine from that definition.
//
//	node ──▶ Backend                                    <Root>/pods/<id>/              survives a reboot
//	           │ CreateSandbox                              root.qcow2                 overlay on the image's disk
//	           │   user · cgroup · taps · DHCP              cidata.iso  serial.log  console.json
//	           │ CreateContainer                         <RunDir>/pods/<id>/           gone after a reboot
//	           │   lease · overlay · cloud-init             pod.json  container.json  taps.json
//	           │   volumes · definition                     vm/                        the machine's sockets
//	           │ StartContainer
//	           ▼   console · agent
//	         machine.Driver ──▶ QEMU                     outlives the daemon
//	           │ Event: the machine ended, and how
//	           ▼
//	         log complete ──▶ state ──▶ node
//
// The driver knows the state of each machine. It remembers how a machine ended until that machine starts again. The
// files record the orders (created, started, exited), so that recovery can tell a machine that never started from a
// machine that has ended.
//
// A container that is started again keeps its machine and disks. A new attempt of the pod's container is a new
// container with new disks.
//
// Begin with Open, which chooses the driver and finds the programs. The Backend does not know which driver it has. The
// package must not decide states (the node does) or make the pod's network, which exists before the backend is called.
package vm
