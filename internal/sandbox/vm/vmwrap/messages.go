package vmwrap

// Environment variables of the wrapper, set in the domain. QEMU does not get them.
const (
	// SocketVar holds the path of the daemon's socket.
	SocketVar = "TRIPOD_TAP_SOCKET"
	// MachineVar holds the machine's name. SecretVar holds a secret as proof that the domain belongs to the machine.
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

// Grant is the answer to a Request. Its descriptor fields are indexes into the descriptors that are sent with the
// Grant.
type Grant struct {
	Files    []File    `json:"files,omitempty"`
	Plain    []Plain   `json:"plain,omitempty"`
	Sockets  []Plain   `json:"sockets,omitempty"`
	Serial   *Serial   `json:"serial,omitempty"`
	Chardevs []Chardev `json:"chardevs,omitempty"`
	Rings    []Ring    `json:"rings,omitempty"`
	NICs     []NIC     `json:"nics,omitempty"`
}

// File replaces a path in -blockdev with a set of descriptors. From the set, QEMU takes the descriptor that has the
// access mode it needs (read-only or read-write).
type File struct {
	Path string `json:"path"`
	FDs  []int  `json:"fds"`
	// Device is set for a block device.
	Device bool `json:"device,omitempty"`
}

// Plain replaces the path of a kernel, an initrd, a share or the directory of VNC's socket with a path in
// /proc/self/fd. A Plain in Grant.Sockets replaces the path of a socket with a connected descriptor.
type Plain struct {
	Path string `json:"path"`
	FD   int    `json:"fd"`
}

// Serial puts QEMU's standard input and output in place of the null device with the given ID. The comment on consoles
// in package qemu says why QEMU needs them.
type Serial struct {
	ID     string `json:"id"`
	Input  int    `json:"input"`
	Output int    `json:"output"`
}

// Chardev puts a listening socket in place of the null device with the given ID.
type Chardev struct {
	ID     string `json:"id"`
	Socket int    `json:"socket"`
}

// Ring puts a ring buffer of Size bytes in place of the null device with the given ID. QEMU supports such buffers, but
// libvirt does not.
type Ring struct {
	ID   string `json:"id"`
	Size int    `json:"size"`
}

// NIC is a network interface to add.
type NIC struct {
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	Tap int    `json:"tap"`
	// VHost is the descriptor of /dev/vhost-net, or nil if the host has no such device.
	VHost *int `json:"vhost,omitempty"`
}

// MaxNICs is the maximum number of interfaces. They use the PCI slots from 0x10 on, which libvirt's q35 machines leave
// free.
const MaxNICs = 8
