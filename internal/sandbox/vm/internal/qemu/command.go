package qemu

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/firmware"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// mark begins the name of a machine of ours on QEMU's command line.
const mark = "tripod-"

// firstFD is the number that the first inherited file has in QEMU.
const firstFD = 3

// monitorSocket is QEMU's monitor, in Definition.Dir beside the sockets of package machine.
const monitorSocket = "qmp.sock"

// vncDir is the directory in Definition.Dir that is QEMU's own: it makes the socket of VNC itself.
const vncDir = "vnc"

// firmwareRing is the ring buffer with what the firmware says.
const firmwareRing = "firmware"

// kind is how a file is opened that QEMU inherits.
type kind string

const (
	kindSocket   kind = "socket"    // a listening unix socket in Definition.Dir
	kindPipe     kind = "pipe"      // the end of a named pipe in Definition.Dir
	kindRead     kind = "read"      // O_RDONLY
	kindWrite    kind = "write"     // O_RDWR
	kindAppend   kind = "append"    // O_WRONLY|O_APPEND, made when it is not there
	kindBoot     kind = "boot"      // O_RDONLY, and such that QEMU's user can open it again
	kindTap      kind = "tap"       // a queue of NICs[Index]'s tap
	kindVhost    kind = "vhost"     // /dev/vhost-net
	kindShare    kind = "share"     // a directory, for reading and writing
	kindShareRO  kind = "share-ro"  // a directory, mounted read-only
	kindVirtiofs kind = "virtiofs"  // the connection to Shares[Index]'s virtiofsd
	kindOwnedDir kind = "owned-dir" // a directory in Definition.Dir that is QEMU's user's
)

// inherited is a file that QEMU inherits.
type inherited struct {
	Kind  kind   `json:"kind"`
	Path  string `json:"path,omitempty"`
	Index int    `json:"index,omitempty"`
}

// setup is what the command line depends on besides the definition.
type setup struct {
	// Accel is AccelKVM or AccelTCG.
	Accel string
	// VhostNet says that the kernel moves the packets of taps by itself.
	VhostNet bool
	// Block says of a disk's path that it is a block device.
	Block func(path string) bool
}

// command is QEMU's command line without the program, and the files that it inherits: Standard as its standard input and
// output, the first of Files as descriptor firstFD.
type command struct {
	Args     []string     `json:"args"`
	Standard [2]inherited `json:"standard"`
	Files    []inherited  `json:"files"`
}

// build makes the command of a definition that validate has accepted. It looks at nothing but its arguments.
func build(d machine.Definition, s setup) command {
	var c command
	c.machine(d, s)
	c.consoles(d)
	for i, disk := range d.Disks {
		c.disk(d, i, disk, s)
	}
	for i, nic := range d.NICs {
		c.nic(i, nic, s)
	}
	for i, share := range d.Shares {
		c.share(i, share)
	}
	if d.VNC {
		dir := c.inherit(inherited{Kind: kindOwnedDir, Path: filepath.Join(d.Dir, vncDir)})
		c.add("-device", "VGA", "-vnc", fmt.Sprintf("unix:/proc/self/fd/%d/vnc.sock", dir))
	}
	return c
}

func (c *command) add(args ...string) { c.Args = append(c.Args, args...) }

// inherit adds a file and gives the number of its descriptor in QEMU.
func (c *command) inherit(f inherited) int {
	c.Files = append(c.Files, f)
	return firstFD + len(c.Files) - 1
}

// fdset adds a file that QEMU opens by a name of its own, and gives that name.
func (c *command) fdset(f inherited) string {
	fd := c.inherit(f)
	c.add("-add-fd", fmt.Sprintf("fd=%d,set=%d", fd, fd))
	return fmt.Sprintf("/dev/fdset/%d", fd)
}

func (c *command) machine(d machine.Definition, s setup) {
	c.add("-name", "guest="+mark+d.Name+",debug-threads=on",
		"-nodefaults", "-no-user-config", "-display", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-machine", "q35,usb=off,vmport=off,dump-guest-core=off"+memoryBackend(d),
		"-accel", acceleration(s.Accel),
		"-cpu", cpuModel(d.CPUModel, s.Accel),
		"-smp", strconv.Itoa(d.CPUs),
		"-m", fmt.Sprintf("%dM", mebibytes(d.Memory)),
		"-uuid", d.UUID,
		"-rtc", "base=utc",
		// A firmware that finds nothing to boot looks again, and says so again.
		"-boot", fmt.Sprintf("strict=on,reboot-timeout=%d", firmware.RetryTime.Milliseconds()),
		// A guest that powers off or panics is kept, paused, for whoever asks; a reboot is a reboot.
		"-action", "reboot=reset,shutdown=pause,panic=pause",
		// A guest that went to sleep could never be woken.
		"-global", "ICH9-LPC.disable_s3=1", "-global", "ICH9-LPC.disable_s4=1")
	if d.HasVirtiofs() {
		c.add("-object", fmt.Sprintf("memory-backend-memfd,id=%s,size=%dM,share=on", memoryID, mebibytes(d.Memory)))
	}
	if d.Kernel != nil {
		// These are opened by fopen, which knows no descriptor sets.
		c.add("-kernel", fmt.Sprintf("/proc/self/fd/%d", c.inherit(inherited{Kind: kindBoot, Path: d.Kernel.Path})))
		if d.Initrd != nil {
			c.add("-initrd", fmt.Sprintf("/proc/self/fd/%d", c.inherit(inherited{Kind: kindBoot, Path: d.Initrd.Path})))
		}
		if d.Cmdline != "" {
			c.add("-append", d.Cmdline)
		}
	}
	c.add("-device", "pvpanic", "-device", "pvpanic-pci",
		"-device", "virtio-rng-pci",
		"-device", "virtio-balloon-pci,id=balloon,deflate-on-oom=on,free-page-reporting=on")
}

// consoles adds the monitor, the serial console and the ports of the agents. The serial console is QEMU's standard input and
// output, a pipe and a file: a socket would end, and take input with it, when its client does not read, and QEMU (7.2) logs a
// byte twice for which its client was not ready.
func (c *command) consoles(d machine.Definition) {
	socket := func(id, name string) {
		fd := c.inherit(inherited{Kind: kindSocket, Path: filepath.Join(d.Dir, name)})
		c.add("-chardev", fmt.Sprintf("socket,id=%s,fd=%d,server=on,wait=off", id, fd))
	}
	socket("monitor", monitorSocket)
	c.add("-mon", "chardev=monitor,mode=control")
	c.Standard = [2]inherited{{Kind: kindPipe, Path: filepath.Join(d.Dir, machine.SerialInput)}, {Kind: kindAppend, Path: d.SerialLog}}
	c.add("-chardev", "stdio,id=serial,signal=off", "-device", "isa-serial,chardev=serial", "-device", "virtio-serial-pci,id=ports")
	c.add("-chardev", fmt.Sprintf("ringbuf,id=%s,size=%d", firmwareRing, firmware.RingSize),
		"-device", fmt.Sprintf("isa-debugcon,iobase=%#x,chardev=%s", firmware.Port, firmwareRing))
	socket("agent", machine.AgentSocket)
	c.add("-device", "virtserialport,bus=ports.0,chardev=agent,name="+wire.PortName)
	socket("qga", machine.QGASocket)
	c.add("-device", "virtserialport,bus=ports.0,chardev=qga,name=org.qemu.guest_agent.0")
}

// disk adds a disk as QEMU's graph of block nodes: its format is what the definition says, and an overlay's base is the
// one that it names, whatever is written in the files (faults I5).
func (c *command) disk(d machine.Definition, i int, disk machine.Disk, s setup) {
	var backing any // null: none, even if the overlay's header names one
	if disk.Base != nil {
		backing = disk.ID + "-base"
		c.node(machine.Disk{ID: disk.ID + "-base", File: disk.Base.File, Format: disk.Base.Format, ReadOnly: true}, nil, s)
	}
	c.node(disk, backing, s)
	device := "virtio-blk-pci"
	if disk.Bus == machine.BusSCSI {
		if i == 0 || !hasSCSI(d.Disks[:i]) {
			c.add("-device", "virtio-scsi-pci,id=scsi")
		}
		device = "scsi-hd,bus=scsi.0"
	}
	device += fmt.Sprintf(",drive=%s,id=disk-%s,serial=%s", disk.ID, disk.ID, disk.ID)
	if !disk.ReadOnly {
		// A guest gets the error of a full or broken disk. If it were paused instead, nobody would resume it.
		device += ",werror=report,rerror=report"
	}
	if i == 0 && d.Kernel == nil {
		device += ",bootindex=1"
	}
	c.add("-device", device)
}

func hasSCSI(disks []machine.Disk) bool {
	for _, d := range disks {
		if d.Bus == machine.BusSCSI {
			return true
		}
	}
	return false
}

// node adds the node of a disk, called as its ID, on the node of its file.
func (c *command) node(disk machine.Disk, backing any, s setup) {
	driver, open := "file", kindWrite
	if s.Block(disk.Path) {
		driver = "host_device"
	}
	if disk.ReadOnly {
		open = kindRead
	}
	c.blockdev(map[string]any{
		"driver": driver, "node-name": disk.ID + "-file", "filename": c.fdset(inherited{Kind: open, Path: disk.Path}),
		"read-only": disk.ReadOnly, "discard": "unmap",
	})
	node := map[string]any{"driver": disk.Format, "node-name": disk.ID, "file": disk.ID + "-file", "read-only": disk.ReadOnly, "discard": "unmap"}
	if disk.Format == "qcow2" {
		node["backing"] = backing
	}
	if disk.Size > 0 {
		node["offset"], node["size"] = disk.Offset, disk.Size
	}
	c.blockdev(node)
}

func (c *command) blockdev(node map[string]any) {
	raw, err := json.Marshal(node) // keys are sorted
	if err != nil {
		panic(err) // strings, booleans and nil
	}
	c.add("-blockdev", string(raw))
}

func (c *command) nic(i int, nic machine.NIC, s setup) {
	netdev := fmt.Sprintf("tap,id=net%d,fd=%d", i, c.inherit(inherited{Kind: kindTap, Index: i}))
	if s.VhostNet {
		netdev += fmt.Sprintf(",vhost=on,vhostfd=%d", c.inherit(inherited{Kind: kindVhost, Path: vhostNet}))
	}
	// Without a ROM it is no boot device, and needs no iPXE.
	device := fmt.Sprintf("virtio-net-pci,netdev=net%d,id=nic%d,mac=%s,romfile=", i, i, nic.MAC)
	if nic.MTU > 0 {
		device += fmt.Sprintf(",host_mtu=%d", nic.MTU)
	}
	c.add("-netdev", netdev, "-device", device)
}

// memoryID is the guest's memory where others than QEMU use it.
const memoryID = "ram"

// memoryBackend is what the machine's type says of its memory.
func memoryBackend(d machine.Definition) string {
	if d.HasVirtiofs() {
		return ",memory-backend=" + memoryID
	}
	return ""
}

// share adds a directory: the connection to its virtiofsd, or a directory that QEMU serves by virtio-9p. "none": the
// guest's files are QEMU's user's, and what it may not change stays as it is; virtiofsd.Open says whose files it meets.
// "mapped-xattr": so they are, and attributes say whose they are for the guest.
func (c *command) share(i int, share machine.Share) {
	if share.Driver == machine.ShareVirtiofs {
		fd := c.inherit(inherited{Kind: kindVirtiofs, Index: i})
		c.add("-chardev", fmt.Sprintf("socket,id=share%d,fd=%d", i, fd),
			"-device", fmt.Sprintf("vhost-user-fs-pci,chardev=share%d,tag=%s,queue-size=1024,%s", i, share.Tag, shareAddress(i)))
		return
	}
	open, model, more := kindShare, "none", ""
	if share.Driver == machine.Share9pMapped {
		model = "mapped-xattr"
	}
	if share.ReadOnly {
		open, more = kindShareRO, ",readonly=on"
	}
	fd := c.inherit(inherited{Kind: open, Path: share.Path})
	c.add("-fsdev", fmt.Sprintf("local,id=share%d,path=/proc/self/fd/%d,security_model=%s,multidevs=remap%s", i, fd, model, more),
		"-device", fmt.Sprintf("virtio-9p-pci,fsdev=share%d,mount_tag=%s,%s", i, share.Tag, shareAddress(i)))
}

const (
	// lastShareSlot is the PCI slot of the first shares: the last one that is free. QEMU gives other devices the first ones.
	lastShareSlot = 0x1e
	perSlot       = 8
	// maxShares leaves 21 slots for other devices.
	maxShares = 64
)

// shareAddress puts eight shares into a PCI slot, of which there are 30 for all devices: a pod may have many volumes.
func shareAddress(i int) string {
	return fmt.Sprintf("multifunction=on,addr=%#x.%d", lastShareSlot-i/perSlot, i%perSlot)
}

func acceleration(accel string) string {
	if accel == AccelKVM {
		return "kvm"
	}
	return "tcg,tb-size=32" // QEMU's own default, up to 1 GiB of translated code, is not for many small guests
}

// cpuModel is the model of the definition or ours: all that the host has under KVM, all that can be emulated without.
func cpuModel(model, accel string) string {
	switch {
	case model != "" && model != "host-model" && model != "host-passthrough":
		return model
	case accel == AccelKVM:
		return "host"
	default:
		return "max"
	}
}

func mebibytes(n uint64) uint64 { return (n + 1<<20 - 1) >> 20 }

// marked tells whether a command line, as /proc has it, is that of the machine's QEMU.
func marked(cmdline []byte, name string) bool {
	return strings.Contains("\x00"+string(cmdline), "\x00guest="+mark+name+",")
}
