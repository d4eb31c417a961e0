// Package vm runs unit pods whose one container is a virtual machine: its image is the machine's disk, or its kernel. The
// daemon's part is here: it joins the image, the pod's network, cloud-init, the console and the guest's agent to a
// definition, and has a driver (internal/sandbox/vm/internal/machine) run it.
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
//	           │ Event: it ended, and how
//	           ▼
//	         log complete ──▶ state ──▶ node
//
// What a machine is doing is known by the driver, which keeps its end until the next start. The files say what was ordered
// (created, started, exited), so that a daemon that was killed at any line can tell a machine that never started from one
// that has ended.
//
// A container that is started again is the same machine with the same root disk. The next attempt is a new container: its
// overlay is fresh.
//
// Begin with Open, which chooses the driver and finds the programs; the Backend does not know which driver it has. The
// package must not decide states (the node does) or make a network: the pod's exists before the backend is called.
package vm
