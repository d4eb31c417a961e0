package machine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// Definition describes a virtual machine. It does not change while the machine runs, and drivers store it as JSON. At
// every start, the driver opens the files that the Definition names.
type Definition struct {
	// Name identifies the machine on this node: 64 lower-case hex digits.
	Name string `json:"name"`
	// UUID is the SMBIOS system UUID, in RFC 9562's text form.
	UUID string `json:"uuid"`
	// Dir is the machine's directory for sockets, on a tmpfs. The driver makes it with mode 0700; the hypervisor's user
	// has no access. StateDir is the machine's directory on disk, for example for the overlay of the root disk.
	Dir      string `json:"dir"`
	StateDir string `json:"stateDir"`

	// CPUs is the number of virtual CPUs. CPUModel is QEMU's name for their model; if it is "", the driver chooses.
	CPUs     int    `json:"cpus"`
	CPUModel string `json:"cpuModel,omitempty"`
	// Memory is the guest's RAM in bytes.
	Memory uint64 `json:"memory"`
	// Growth, if set, lets the machine grow while it runs. It needs Plug, and a guest with a driver for virtio-mem. Definitions
	// by earlier releases lack it.
	Growth *Growth `json:"growth,omitempty"`

	// Disks are in the guest's order, the root disk or the CD-ROM first if there is one.
	Disks []Disk `json:"disks,omitempty"`
	// Kernel and Initrd, if set, are booted directly, with the command line Cmdline.
	Kernel  *File  `json:"kernel,omitempty"`
	Initrd  *File  `json:"initrd,omitempty"`
	Cmdline string `json:"cmdline,omitempty"`
	// UEFI, if set, makes the machine boot its root disk by UEFI. Otherwise the machine has a BIOS. A machine with a
	// Kernel has no UEFI.
	UEFI *UEFI `json:"uefi,omitempty"`

	NICs   []NIC   `json:"nics,omitempty"`
	Shares []Share `json:"shares,omitempty"`

	// SerialLog is the path of the serial console's log. All output is appended to it. If the file system is full,
	// output is dropped.
	SerialLog string `json:"serialLog"`

	// UID and GID are the user and group of the hypervisor process.
	UID int `json:"uid"`
	GID int `json:"gid"`
	// Cgroup is the path of the machine's cgroup, relative to the root of each hierarchy. The cgroup must exist.
	Cgroup string `json:"cgroup"`

	// LibvirtCPU is XML for the <cpu> element of a libvirt domain. Other drivers refuse it.
	LibvirtCPU string `json:"libvirtCPU,omitempty"`
	// SessionPorts adds the virtio-serial ports wire.SessionPortNames. Definitions by earlier releases lack them.
	SessionPorts bool `json:"sessionPorts,omitempty"`
	// Plug adds a SCSI controller for the disks of Driver.Plug, and what Driver.Save needs.
	Plug bool `json:"plug,omitempty"`
	// Hotplug adds a port, in which Driver.Plug puts such a controller when the first disk comes. A controller that is there
	// from the start delays the boot, because guests search it for disks. Definitions by earlier releases lack Hotplug. The
	// driver libvirt ignores it.
	Hotplug bool `json:"hotplug,omitempty"`
	// Saved, if set, is a directory in which Driver.Save has saved a machine with the same Driver.SaveKey. The machine
	// continues from there instead of booting. Its NICs and shares are plugged in before it continues.
	Saved string `json:"saved,omitempty"`
	// VNC asks for a screen, and a VNC server on VNCSocket.
	VNC bool `json:"vnc,omitempty"`
}

// Growth says how a machine grows.
type Growth struct {
	// Boot is the memory in bytes with which the machine boots, or continues from a saved state. It gets the rest of
	// Definition.Memory when the guest's driver asks.
	Boot uint64 `json:"boot"`
	// Memory, in bytes, and CPUs are the most that Driver.SetMemory and Driver.AddCPUs can give.
	Memory uint64 `json:"memory"`
	CPUs   int    `json:"cpus"`
}

// GrowthUnit is the unit in bytes in which a machine's memory grows.
const GrowthUnit = 2 << 20

// BootMemory is the memory in bytes with which the machine boots.
func (d *Definition) BootMemory() uint64 {
	if d.Growth != nil {
		return d.Growth.Boot
	}
	return d.Memory
}

// MostMemory is the most memory in bytes that Driver.SetMemory can give.
func (d *Definition) MostMemory() uint64 {
	if d.Growth != nil {
		return d.Growth.Memory
	}
	return d.Memory
}

// File is a file of the machine. The daemon, which is root, opens it; the hypervisor process needs no access.
type File struct {
	Path string `json:"path"`
}

// FilePart is a part of a file or a block device.
type FilePart struct {
	File
	// Offset and Size select the part, in bytes. If Size is 0, the part is the whole file.
	Offset uint64 `json:"offset,omitempty"`
	Size   uint64 `json:"size,omitempty"`
}

// UEFI is the flash memory of a machine that boots by UEFI. Both files are raw images.
type UEFI struct {
	// Code is the firmware. The guest cannot write to it, so machines share the file.
	Code File `json:"code"`
	// Vars is the machine's own copy of the firmware's variables (NVRAM). The guest and the firmware write to it. If it
	// is a part of a block device, the root disk is another part of that device. The driver libvirt refuses a part.
	Vars FilePart `json:"vars"`
}

// BootID returns the boot ID of the node. PIDs and start times that were recorded during another boot are meaningless.
var BootID = sync.OnceValue(func() string {
	raw, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw))
})

// Bus is the bus of a disk.
type Bus string

const (
	BusVirtio Bus = "virtio"
	BusSCSI   Bus = "scsi"
	// BusCDROM is a CD-ROM drive on a SATA bus. Only the first disk of a machine can be in it, and only a raw and
	// read-only one.
	BusCDROM Bus = "cdrom"
)

// Disk is a disk of the machine. Formats are always given, never probed (fault I5).
type Disk struct {
	// ID is a short name, unique in the machine, such as root, cidata, agent or disk0.
	ID string `json:"id"`
	File
	// Format is "qcow2" or "raw".
	Format   string `json:"format"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	Bus      Bus    `json:"bus"`
	// If Format is raw, Offset and Size select a part of the file, in bytes. If Size is 0, the disk is the whole file.
	Offset uint64 `json:"offset,omitempty"`
	Size   uint64 `json:"size,omitempty"`
	// LogicalBlock and PhysicalBlock are the sizes of the device's sectors in bytes, which the guest sees. 0 means 512.
	LogicalBlock  int `json:"logicalBlock,omitempty"`
	PhysicalBlock int `json:"physicalBlock,omitempty"`
	// Like, if set, describes the content, which is the machine's own: a machine can continue from the saved state of another
	// one whose disk differs, but has the same Like. Otherwise disks to read must be the same.
	Like string `json:"like,omitempty"`
	// If Format is qcow2, Base is the image below the overlay. Nothing writes to Base.
	Base *Base `json:"base,omitempty"`
}

// PlugDisk is a raw disk that a running machine gets.
type PlugDisk struct {
	// LUN is the disk's number at the controller.
	LUN int
	// Serial is the disk's serial number, at most 20 letters, digits, - and _. If it is "", the serial number is plug and LUN.
	Serial string
	// File is a file or a block device, open for writing unless ReadOnly is set. The caller closes it.
	File     *os.File
	ReadOnly bool
	// LogicalBlock and PhysicalBlock are those of a Disk.
	LogicalBlock, PhysicalBlock int
}

// Base is the read-only image below an overlay.
type Base struct {
	File
	Format string `json:"format"`
}

// NIC is a network interface of the machine, connected to a persistent tap in a network namespace.
type NIC struct {
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	// Netns is the path of Tap's namespace.
	Netns string `json:"netns"`
	Tap   string `json:"tap"`
}

// HardwareAddr parses MAC.
func (n NIC) HardwareAddr() (net.HardwareAddr, error) { return net.ParseMAC(n.MAC) }

// ShareDriver says how the guest accesses a shared directory.
type ShareDriver string

const (
	// ShareVirtiofs is virtio-fs, served by virtiofsd. The guest sees the files' own owners and permissions.
	ShareVirtiofs ShareDriver = "virtiofs"
	// Share9p is virtio-9p, served by QEMU, for guests without virtio-fs. Files that the guest creates belong to root.
	Share9p ShareDriver = "9p"
	// Share9pMapped is like Share9p, but the owners, modes and special files that the guest sees are stored as extended
	// attributes of plain files.
	Share9pMapped ShareDriver = "9p-mapped"
)

// By9p reports whether the guest mounts the share over 9p.
func (d ShareDriver) By9p() bool { return d == Share9p || d == Share9pMapped }

// Share is a directory of the node that the guest mounts by Tag.
type Share struct {
	Tag      string      `json:"tag"`
	Path     string      `json:"path"`
	Driver   ShareDriver `json:"driver"`
	ReadOnly bool        `json:"readOnly,omitempty"`
	// Live means that what is mounted below Path later appears in the share, too. The guest then sees the files' owners
	// unchanged; see virtiofsd.OpenLive.
	Live bool `json:"live,omitempty"`
}

// BootOrder returns the position, counted from 1, at which the firmware tries to boot the disk with index i. It returns
// 0 if the firmware does not try the disk. If the CD-ROM does not boot, or its boot loader gives up, the firmware tries
// the first disk to which a system can be installed.
func (d *Definition) BootOrder(i int) int {
	switch {
	case d.Kernel != nil:
		return 0
	case i == 0:
		return 1
	case i == 1 && d.Disks[0].Bus == BusCDROM && !d.Disks[1].ReadOnly:
		return 2
	}
	return 0
}

var (
	// ErrSaved is in the errors of Driver.Start of a machine that did not continue from its saved state. The next may do so.
	ErrSaved = errors.New("the machine cannot continue from its saved state")
	// ErrRefused is in them, too, if no machine can: the state is damaged, or that of another machine.
	ErrRefused = errors.New("the saved state is refused")
)

// SavedDevices is how many NICs and shares a machine with Definition.Saved can have.
const SavedDevices = 8

// CheckSaved returns an error that says why a machine cannot continue from a saved state: it has too many NICs and shares, a
// share that cannot be plugged in, or UEFI, whose variables would be saved, too.
func CheckSaved(d Definition) error {
	switch {
	case len(d.NICs)+len(d.Shares) > SavedDevices:
		return fmt.Errorf("it has %d NICs and shares, more than %d", len(d.NICs)+len(d.Shares), SavedDevices)
	case slices.ContainsFunc(d.Shares, func(s Share) bool { return s.Driver != ShareVirtiofs }):
		return errors.New("it has a share that is not a virtio-fs")
	case d.UEFI != nil:
		return errors.New("it boots by UEFI")
	}
	return nil
}

// HasVirtiofs reports whether a share uses virtio-fs. The guest's memory must then be shared with virtiofsd.
func (d *Definition) HasVirtiofs() bool {
	return slices.ContainsFunc(d.Shares, func(s Share) bool { return s.Driver == ShareVirtiofs })
}

// Files in Definition.Dir for communication with a running machine. A socket serves one client at a time.
const (
	// SerialInput is the named pipe for the serial console's input. The output goes to the serial log.
	SerialInput = "serial.in"
	// AgentSocket is the socket of tripod-agent's virtio-serial port, wire.PortName.
	AgentSocket = "agent.sock"
	// QGASocket is the socket of the QEMU guest agent's virtio-serial port, org.qemu.guest_agent.0.
	QGASocket = "qga.sock"
	// VNCSocket is the socket of the VNC server, VNCName in VNCDir. The hypervisor makes it, so its user owns the directory.
	VNCDir, VNCName = "vnc", "vnc.sock"
	VNCSocket       = VNCDir + "/" + VNCName
)

// SessionSockets are the sockets of the virtio-serial ports wire.SessionPortNames. A client locks a socket's lock file
// before it connects; see LockFile.
var SessionSockets = [2]string{"sessions0.sock", "sessions1.sock"}

// LockFile returns the path of a socket's lock file.
func LockFile(socket string) string { return socket + ".lock" }

// Phase is the phase of a machine.
type Phase string

const (
	Defined Phase = "defined" // not started yet
	Running Phase = "running"
	Ended   Phase = "ended" // Cause and ExitCode say how
)

// Cause is the cause of a machine's end.
type Cause string

const (
	// CausePowerOff means that the guest turned itself off.
	CausePowerOff Cause = "poweroff"
	// CausePanic means that the guest's kernel reported a panic (pvpanic).
	CausePanic Cause = "panic"
	// CauseKilled means that the daemon killed the hypervisor process.
	CauseKilled Cause = "killed"
	// CauseOOM means that the kernel killed the hypervisor process because its cgroup was out of memory.
	CauseOOM Cause = "oom"
	// CauseFailed means that the hypervisor process ended by itself, or another process killed it.
	CauseFailed Cause = "failed"
	// CauseNoBoot means that the firmware found nothing to boot. Drivers do not report this cause. The backend reads
	// the firmware's output, sets the cause and kills the machine.
	CauseNoBoot Cause = "noboot"
	// CauseStart means that the start failed.
	CauseStart Cause = "start"
	// CauseUnknown means that no daemon observed the end, for example because the node was rebooted.
	CauseUnknown Cause = "unknown"
)

// Exit codes to report if the hypervisor has no useful exit code.
const (
	// ExitKilled is 128+SIGKILL.
	ExitKilled int32 = 137
	// ExitPanic is 128+SIGABRT, for a panic of the guest's kernel.
	ExitPanic int32 = 134
)

// State is the state of a machine.
type State struct {
	Phase      Phase     `json:"phase"`
	Pid        int       `json:"pid,omitempty"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	Cause      Cause     `json:"cause,omitempty"`
	// ExitCode is 0 for a power-off, ExitPanic for a panic, and ExitKilled for a kill or an unobserved end. In all
	// other cases it is the process's exit code (128+n for signal n), but never 0.
	ExitCode int32 `json:"exitCode,omitempty"`
	// Message explains to people how the machine ended. It includes the hypervisor's last words.
	Message string `json:"message,omitempty"`
}

// Event reports the end of a machine.
type Event struct {
	Name  string
	State State
}

// Stats holds those statistics of a running machine that its cgroup does not provide.
type Stats struct {
	// Memory is the RAM in bytes that the guest has now; 0 if unknown.
	Memory uint64
	// Blocks maps each Disk.ID to the disk's counters.
	Blocks map[string]BlockStats
}

// BlockStats are the counters of a disk.
type BlockStats struct{ ReadBytes, WriteBytes, ReadOps, WriteOps uint64 }

// Driver runs machines. Its methods can be called concurrently, but only one call at a time may change a machine,
// except that Destroy can be called while a Shutdown is in progress. Errors carry an errdefs class. Machines outlive
// the driver.
type Driver interface {
	// Name is "qmp" or "libvirt".
	Name() string
	// Ready returns nil if machines can be defined and started, otherwise errdefs.ErrUnavailable with the reason, for
	// example that libvirtd is not running. It does not block.
	Ready() error
	// Recover is called before any method that needs a machine. If Recover fails, it is called again. Recover takes
	// over the named machines, removes other machines that this driver made, and from then on reports the end of every
	// machine to sink. The result omits machines that the driver does not know.
	Recover(ctx context.Context, names []string, sink func(Event)) (map[string]State, error)
	// Define defines a machine, or replaces the definition of a machine that is not running. A repeated call with the
	// same definition has no effect.
	Define(ctx context.Context, d Definition) error
	// Start starts a machine that is defined or has ended. It returns when the hypervisor reports that the guest's CPUs
	// run. If the start fails, Start returns errdefs.ErrFailedPrecondition or errdefs.ErrUnavailable with the
	// hypervisor's last words, and the machine is Ended with CauseStart.
	Start(ctx context.Context, name string) error
	// Shutdown presses the power button and returns without waiting. An Event reports the end of the machine. Shutdown
	// can be called repeatedly.
	Shutdown(ctx context.Context, name string) error
	// Destroy kills the machine and returns when it has ended. It has no effect on a machine that is not running.
	Destroy(ctx context.Context, name string) error
	// State returns the machine's state, or errdefs.ErrNotFound if the machine is not defined.
	State(ctx context.Context, name string) (State, error)
	// SetMemory changes the memory that the guest of a running machine may use, at most Definition.MostMemory, and returns
	// once the guest has released or taken the difference. It rounds what a machine grows by up to GrowthUnit. If the guest
	// does not react, because it has no driver for the balloon or for virtio-mem, SetMemory returns errdefs.ErrNotImplemented.
	// If the guest releases too little, because it uses the memory, SetMemory returns errdefs.ErrFailedPrecondition. In both
	// cases the guest gets its earlier memory back.
	SetMemory(ctx context.Context, name string, memory uint64) error
	// AddCPUs adds CPUs to a running machine until it has the given number, at most Growth.CPUs, and does nothing if it has as
	// many. The guest must put them online. A machine without Growth returns errdefs.ErrNotImplemented.
	AddCPUs(ctx context.Context, name string, cpus int) error
	// Plug adds a disk to the controller of a running machine with Definition.Plug or Definition.Hotplug. The disk is gone when
	// the machine ends. Plug does nothing if the machine has a disk with this LUN. A driver that cannot do it returns
	// errdefs.ErrNotImplemented.
	Plug(ctx context.Context, name string, d PlugDisk) error
	// Unplug takes a disk of Plug away from a running machine, without asking the guest, and returns when the hypervisor has
	// closed the disk's file. It completes an earlier call to Plug or Unplug that was interrupted, and does nothing if there is
	// no disk with this LUN. A driver that cannot do it returns errdefs.ErrNotImplemented.
	Unplug(ctx context.Context, name string, lun int) error
	// Save pauses a running machine with Definition.Plug, without NICs and shares, and saves its memory and the state of
	// its devices, but not its disks, in a directory that is empty. After that, the machine can only be destroyed. A
	// driver that cannot do it returns errdefs.ErrNotImplemented.
	Save(ctx context.Context, name, dir string) error
	// SaveKey identifies everything on which a saved state depends: the hypervisor, the processor, and the machine without
	// its NICs and shares. A machine can continue from the state of another one with the same key, and Start returns
	// errdefs.ErrFailedPrecondition if the keys differ.
	SaveKey(ctx context.Context, d Definition) (string, error)
	// Stats returns statistics of a running machine.
	Stats(ctx context.Context, name string) (Stats, error)
	// Firmware returns what the machine's firmware has written to its debug port since the last call. Only the last
	// boot.RingSize bytes are kept. If the machine is not running, Firmware returns errdefs.ErrFailedPrecondition.
	Firmware(ctx context.Context, name string) (string, error)
	// Undefine removes a machine. If the machine is running, Undefine destroys it first. Undefine has no effect on an
	// unknown machine.
	Undefine(ctx context.Context, name string) error
	// Close stops the driver. Machines continue to run.
	Close() error
}

// Opener opens a machine's devices as root immediately before the machine starts. The caller closes the files.
type Opener interface {
	// Tap opens a queue of the NIC's persistent tap.
	Tap(ctx context.Context, nic NIC) (*os.File, error)
}
