package vmwrap

// Environment variables of the wrapper, set in the domain. QEMU does not get them.
const (
	// SocketVar is the path of the daemon's socket.
	SocketVar = "TRIPOD_TAP_SOCKET"
	// MachineVar is the machine's name. SecretVar proves that the domain belongs to the machine.
	MachineVar = "TRIPOD_MACHINE"
	SecretVar  = "TRIPOD_TAP_SECRET"
)

// Names of the links in the directory of a domain's <emulator>.
const (
	ProgramName = "tripod-vmwrap"
	// EmulatorName is the link to QEMU.
	EmulatorName = "qemu"
)

// Request requests the Grant for a machine.
type Request struct {
	Machine string `json:"machine"`
	Secret  string `json:"secret"`
}

// Grant is the answer to a Request. The descriptor fields are indexes into the descriptors that accompany it.
type Grant struct {
	Files    []File    `json:"files,omitempty"`
	Plain    []Plain   `json:"plain,omitempty"`
	Sockets  []Plain   `json:"sockets,omitempty"`
	Serial   *Serial   `json:"serial,omitempty"`
	Chardevs []Chardev `json:"chardevs,omitempty"`
	Rings    []Ring    `json:"rings,omitempty"`
	NICs     []NIC     `json:"nics,omitempty"`
}

// File replaces a path in -blockdev with descriptors, from which QEMU chooses by access mode (read-only, read-write).
type File struct {
	Path string `json:"path"`
	FDs  []int  `json:"fds"`
	// Device is set for a block device.
	Device bool `json:"device,omitempty"`
}

// Plain replaces the path of a kernel, an initrd, a share or the directory of VNC's socket with a path in
// /proc/self/fd. In Sockets, it replaces the path of a socket with a connected descriptor.
type Plain struct {
	Path string `json:"path"`
	FD   int    `json:"fd"`
}

// Serial puts QEMU's standard input and output in place of the null device with that ID (package qemu gives the
// reason).
type Serial struct {
	ID     string `json:"id"`
	Input  int    `json:"input"`
	Output int    `json:"output"`
}

// Chardev puts a listening socket in place of the null device with that ID.
type Chardev struct {
	ID     string `json:"id"`
	Socket int    `json:"socket"`
}

// Ring puts a ring buffer of Size bytes in QEMU, which libvirt does not support, in place of the null device with that
// ID.
type Ring struct {
	ID   string `json:"id"`
	Size int    `json:"size"`
}

// NIC is a network interface to add.
type NIC struct {
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	Tap int    `json:"tap"`
	// VHost is the descriptor of /dev/vhost-net, if the host has it.
	VHost *int `json:"vhost,omitempty"`
}

// MaxNICs is the maximum number of interfaces. libvirt's q35 machines leave the PCI slots from 0x10 free.
const MaxNICs = 8
