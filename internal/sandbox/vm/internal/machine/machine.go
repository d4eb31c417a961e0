package machine

import (
	"context"
	"net"
	"os"
	"slices"
	"time"
)

// Definition is one virtual machine. It is immutable once defined, and drivers store it as it is. Files are opened for every
// start; everything else is plain data.
type Definition struct {
	// Name identifies the machine on this node: 64 lower-case hex digits.
	Name string `json:"name"`
	// UUID is the SMBIOS system UUID, in RFC 9562's text form.
	UUID string `json:"uuid"`
	// Dir is the machine's own directory on a tmpfs (sockets), made by the driver with mode 0700; the hypervisor's user has no
	// access to it. StateDir is its directory on disk (root overlay).
	Dir      string `json:"dir"`
	StateDir string `json:"stateDir"`

	// CPUs is the number of virtual CPUs, CPUModel QEMU's name of their model ("" is the driver's choice).
	CPUs     int    `json:"cpus"`
	CPUModel string `json:"cpuModel,omitempty"`
	// Memory is the guest's RAM in bytes.
	Memory uint64 `json:"memory"`

	// Disks are in the guest's order: the root disk first, where there is one.
	Disks []Disk `json:"disks,omitempty"`
	// Kernel and Initrd say that the machine boots them directly; Cmdline is the kernel's command line then.
	Kernel  *File  `json:"kernel,omitempty"`
	Initrd  *File  `json:"initrd,omitempty"`
	Cmdline string `json:"cmdline,omitempty"`

	NICs   []NIC   `json:"nics,omitempty"`
	Shares []Share `json:"shares,omitempty"`

	// SerialLog is the path of the file to which all output of the serial console is appended, whoever listens. What there is no
	// room for is dropped.
	SerialLog string `json:"serialLog"`

	// UID and GID are what the hypervisor process runs as.
	UID int `json:"uid"`
	GID int `json:"gid"`
	// Cgroup is the path, below the roots of the hierarchies, of the cgroup in which it runs; it is there already.
	Cgroup string `json:"cgroup"`

	// LibvirtCPU is XML for the <cpu> element of a libvirt domain; other drivers refuse it.
	LibvirtCPU string `json:"libvirtCPU,omitempty"`
	// VNC asks for a VNC server on a unix socket, vnc/vnc.sock in Dir.
	VNC bool `json:"vnc,omitempty"`
}

// File is a file that the machine uses, by path. The daemon, which is root, opens it; the hypervisor process need not be
// able to.
type File struct {
	Path string `json:"path"`
}

// Bus is how a disk is attached.
type Bus string

// The buses.
const (
	BusVirtio Bus = "virtio"
	BusSCSI   Bus = "scsi"
)

// Disk is a disk of the machine. Formats are always said, never probed (faults I5).
type Disk struct {
	// ID is a short name, unique in the machine: root, cidata, agent, disk0 …
	ID string `json:"id"`
	File
	// Format is "qcow2" or "raw".
	Format   string `json:"format"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	Bus      Bus    `json:"bus"`
	// Offset and Size, with Format raw, say which bytes of the file are the disk; a Size of 0 is the whole file.
	Offset uint64 `json:"offset,omitempty"`
	Size   uint64 `json:"size,omitempty"`
	// Base, with Format qcow2, is the image below the overlay; it is only ever read.
	Base *Base `json:"base,omitempty"`
}

// Base is the read-only image below an overlay.
type Base struct {
	File
	Format string `json:"format"`
}

// NIC is a network interface of the machine, joined to a persistent tap in a network namespace.
type NIC struct {
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	// Netns is the path of the namespace in which Tap is.
	Netns string `json:"netns"`
	Tap   string `json:"tap"`
}

// HardwareAddr parses MAC.
func (n NIC) HardwareAddr() (net.HardwareAddr, error) { return net.ParseMAC(n.MAC) }

// ShareDriver is how a directory reaches the guest.
type ShareDriver string

// The ways.
const (
	// ShareVirtiofs is virtio-fs, served by virtiofsd: owners and permissions are those of the files.
	ShareVirtiofs ShareDriver = "virtiofs"
	// Share9p is virtio-9p, served by QEMU, for guests without virtio-fs. What the guest makes is root's.
	Share9p ShareDriver = "9p"
	// Share9pMapped is the same with owners, modes and special files as the guest sees them in attributes of plain files.
	Share9pMapped ShareDriver = "9p-mapped"
)

// By9p tells whether the guest mounts it by 9p.
func (d ShareDriver) By9p() bool { return d == Share9p || d == Share9pMapped }

// Share is a directory of the node that the guest mounts by Tag.
type Share struct {
	Tag      string      `json:"tag"`
	Path     string      `json:"path"`
	Driver   ShareDriver `json:"driver"`
	ReadOnly bool        `json:"readOnly,omitempty"`
}

// HasVirtiofs tells whether a share is by virtio-fs: then the guest's memory must be shared with virtiofsd.
func (d *Definition) HasVirtiofs() bool {
	return slices.ContainsFunc(d.Shares, func(s Share) bool { return s.Driver == ShareVirtiofs })
}

// What of a running machine can be reached, in Definition.Dir. A socket takes one client at a time.
const (
	// SerialInput is the named pipe that takes the serial console's input. Its output is in the serial log.
	SerialInput = "serial.in"
	// AgentSocket is the virtio-serial port of tripod-agent, wire.PortName.
	AgentSocket = "agent.sock"
	// QGASocket is the port of the QEMU guest agent, org.qemu.guest_agent.0.
	QGASocket = "qga.sock"
)

// Phase is what a machine is doing.
type Phase string

// The phases.
const (
	// Defined: it is known and does not run.
	Defined Phase = "defined"
	Running Phase = "running"
	// Ended: it ran; Cause and ExitCode say how it ended.
	Ended Phase = "ended"
)

// Cause is how a machine ended.
type Cause string

// The causes.
const (
	// CausePowerOff: the guest turned itself off.
	CausePowerOff Cause = "poweroff"
	// CausePanic: the guest's kernel reported a panic (pvpanic).
	CausePanic Cause = "panic"
	// CauseKilled: the hypervisor process was killed by us.
	CauseKilled Cause = "killed"
	// CauseOOM: it was killed since its cgroup was out of memory.
	CauseOOM Cause = "oom"
	// CauseFailed: the hypervisor process ended by itself, or by somebody else's signal.
	CauseFailed Cause = "failed"
	// CauseNoBoot: its firmware found nothing to boot. No driver says it: who reads the firmware's words kills the machine.
	CauseNoBoot Cause = "noboot"
	// CauseStart: it could not be started.
	CauseStart Cause = "start"
	// CauseUnknown: nobody saw it end (a reboot of the node).
	CauseUnknown Cause = "unknown"
)

// Exit codes of machines whose hypervisor has none that says something.
const (
	// ExitKilled is 128+SIGKILL.
	ExitKilled int32 = 137
	// ExitPanic is that of a guest whose kernel panicked: 128+SIGABRT.
	ExitPanic int32 = 134
)

// State is what there is of a machine.
type State struct {
	Phase      Phase     `json:"phase"`
	Pid        int       `json:"pid,omitempty"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	Cause      Cause     `json:"cause,omitempty"`
	// ExitCode is 0 for a power-off, ExitPanic for a panic, ExitKilled for one that was killed or whose end nobody saw, else
	// the process's own (128+n for a signal) and never 0.
	ExitCode int32 `json:"exitCode,omitempty"`
	// Message says more, for a person: the hypervisor's last words.
	Message string `json:"message,omitempty"`
}

// Event tells that a machine ended.
type Event struct {
	Name  string
	State State
}

// Stats are figures of a running machine that its cgroup does not have.
type Stats struct {
	// BalloonActual is the guest's RAM in bytes as the balloon leaves it; 0 when unknown.
	BalloonActual uint64
	// Blocks holds bytes and operations per Disk.ID.
	Blocks map[string]BlockStats
}

// BlockStats are the counters of a disk.
type BlockStats struct{ ReadBytes, WriteBytes, ReadOps, WriteOps uint64 }

// Driver runs machines. Its methods may be called from many goroutines, but never two at a time that change the same
// machine, except that Destroy may arrive while Shutdown's effect is awaited. Errors carry an errdefs class. What runs
// outlives the driver.
type Driver interface {
	// Name is "qmp" or "libvirt".
	Name() string
	// Ready tells, without waiting, why new machines cannot be made or started now: another daemon that runs them, for
	// instance, is not there. It is nil when they can, and errdefs.ErrUnavailable otherwise.
	Ready() error
	// Recover is called once, first: it finds the machines again whose names are given, removes what carries this driver's
	// mark and is not named, and from then on reports ends to sink. A name that is not there is missing in the answer.
	Recover(ctx context.Context, names []string, sink func(Event)) (map[string]State, error)
	// Define makes the machine known, or replaces the definition of one that does not run. Repeated with the same
	// definition it does nothing.
	Define(ctx context.Context, d Definition) error
	// Start runs a machine that is defined or has ended, and returns when the hypervisor says that its CPUs run. One that
	// cannot be started is errdefs.ErrFailedPrecondition or errdefs.ErrUnavailable with the hypervisor's words, and Ended
	// with CauseStart.
	Start(ctx context.Context, name string) error
	// Shutdown presses the power button and returns; the end is an event. Pressing it again is harmless.
	Shutdown(ctx context.Context, name string) error
	// Destroy kills the machine and returns when it is dead. One that does not run is fine.
	Destroy(ctx context.Context, name string) error
	// State tells what there is of it: errdefs.ErrNotFound when it is not defined.
	State(ctx context.Context, name string) (State, error)
	// Stats asks a running machine.
	Stats(ctx context.Context, name string) (Stats, error)
	// Firmware takes what the firmware of a running machine has said on its debug port since this was last called; what is older
	// than firmware.RingSize bytes is lost. One that does not run is errdefs.ErrFailedPrecondition.
	Firmware(ctx context.Context, name string) (string, error)
	// Undefine forgets a machine, destroying it first if it runs. One that is not defined is fine.
	Undefine(ctx context.Context, name string) error
	// Close ends what the driver does; machines go on running.
	Close() error
}

// Opener opens what a machine needs, as root, right before it is started. The files are the caller's to close.
type Opener interface {
	// Tap opens a queue of the NIC's persistent tap.
	Tap(ctx context.Context, nic NIC) (*os.File, error)
}
