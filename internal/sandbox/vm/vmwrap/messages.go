package vmwrap

// Variables of the wrapper's environment, set in the domain. QEMU does not get them.
const (
	// SocketVar is the path of the tap service's socket.
	SocketVar = "TRIPOD_TAP_SOCKET"
	// MachineVar is the machine's name, SecretVar what proves that the domain is that machine's.
	MachineVar = "TRIPOD_MACHINE"
	SecretVar  = "TRIPOD_TAP_SECRET"
)

// Names of the links beside each other in the directory that a domain's <emulator> is in.
const (
	ProgramName = "tripod-vmwrap"
	// EmulatorName is the link to QEMU.
	EmulatorName = "qemu"
)

// Request asks for what a machine's domain is to be started with.
type Request struct {
	Machine string `json:"machine"`
	Secret  string `json:"secret"`
}

// Grant is the answer. Numbers of type int that are called FD are indexes into the descriptors that come along.
type Grant struct {
	Files    []File    `json:"files,omitempty"`
	Plain    []Plain   `json:"plain,omitempty"`
	Sockets  []Plain   `json:"sockets,omitempty"`
	Serial   *Serial   `json:"serial,omitempty"`
	Chardevs []Chardev `json:"chardevs,omitempty"`
	Rings    []Ring    `json:"rings,omitempty"`
	NICs     []NIC     `json:"nics,omitempty"`
}

// File stands for a path in -blockdev: QEMU chooses among the descriptors by how it wants to open (read-only, read-write).
type File struct {
	Path string `json:"path"`
	FDs  []int  `json:"fds"`
	// Device says that it is a block device.
	Device bool `json:"device,omitempty"`
}

// Plain stands for the path of a kernel, an initrd, a share or the directory of VNC's socket, which QEMU uses by name: it
// gets one below /proc/self/fd. Among the Sockets it stands for the path of one that QEMU would connect to: it is connected.
type Plain struct {
	Path string `json:"path"`
	FD   int    `json:"fd"`
}

// Serial stands for the null device of that ID: QEMU's standard input and output (package qemu says why).
type Serial struct {
	ID     string `json:"id"`
	Input  int    `json:"input"`
	Output int    `json:"output"`
}

// Chardev stands for the null device of that ID: a listening socket.
type Chardev struct {
	ID     string `json:"id"`
	Socket int    `json:"socket"`
}

// Ring stands for the null device of that ID: a ring buffer in QEMU of Size bytes, which libvirt does not have.
type Ring struct {
	ID   string `json:"id"`
	Size int    `json:"size"`
}

// NIC is a network interface that is added.
type NIC struct {
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	Tap int    `json:"tap"`
	// VHost is /dev/vhost-net, where the host has it.
	VHost *int `json:"vhost,omitempty"`
}

// MaxNICs is how many interfaces a machine can have: the slots from 0x10 on are free in libvirt's machines of type q35.
const MaxNICs = 8
