// Package vm runs pods in virtual machines. Backend runs unit pods whose single container is a machine: the container's image
// holds the machine's disk or kernel. Package oci, which uses Backend, runs the OCI containers of a pod in a machine of the pod's
// own; guests.go has what Backend offers to it.
//
// Backend combines the image, the pod's network, cloud-init, the console and the guest's agent into a definition. A driver
// (internal/sandbox/vm/internal/machine) runs the machine from that definition.
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
//
// # Subpackages
//
//	oci                    runs the OCI containers of pods in machines
//	templates              makes and keeps the machines from which others continue
//	guestagent             tripod-agent, which serves the host in the guest
//	guestinit              tripod-init, the first process of a guest with containers
//	guestnode              the part of tripod-guest that runs the containers in such a guest
//	vmwrap                 tripod-vmwrap, which libvirt executes in place of QEMU
//	internal/machine       the contract between the backend and the drivers
//	internal/qemu          the driver qmp: QEMU processes that it starts itself
//	internal/libvirt       the driver libvirt: domains of a libvirtd
//	internal/qmp           the QEMU Machine Protocol
//	internal/confine       starts QEMU and virtiofsd, confined
//	internal/agent         the host's side of tripod-agent
//	internal/guestapi      what the daemon and tripod-guest say to each other
//	internal/identity      random numbers and a clock for a guest that continues from a saved state
//	internal/annotations   parses a pod's annotations about its machine
//	internal/cloudinit     makes the disk that configures a guest at its first boot
//	internal/iso9660       makes ISO 9660 images, for cloud-init and the agent
//	internal/console       connects the serial console to the log and to attached clients
//	internal/tap           gives the pod's network to the machine
//	internal/virtiofsd     shares directories of the node with a machine
//	internal/sessions      serves exec, attach and port-forward in a session carrier
//	internal/hotplug       keeps account of the disks that a running machine has got
//	internal/renewal       what is done in guests of disk machines for templates
//	internal/rootdisk      keeps a root disk on a block device of the node
//	internal/blockdev      opens block devices of the node
//	internal/volumes       converts mounts and devices to what a machine can have
//	internal/validate      says which fields a machine cannot have
//	internal/resources     computes what a machine gets of the node's CPUs and memory
//	internal/boot          finds out how a disk boots, and with which firmware
package vm
