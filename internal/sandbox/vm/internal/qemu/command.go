package qemu

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// namePrefix is the prefix of a machine's name on QEMU's command line.
const namePrefix = "tripod-"

// firstFD is the descriptor number of the first inherited file in QEMU.
const firstFD = 3

// monitorSocket is the socket of QEMU's monitor, in Definition.Dir beside the sockets of package machine.
const monitorSocket = "qmp.sock"

// firmwareRing is the ring buffer that holds the firmware's debug output.
const firmwareRing = "firmware"

// The block nodes of the two flash chips of a machine that boots by UEFI. The names contain a dot, and so differ from all
// disk IDs.
const (
	flashCode = "flash.code"
	flashVars = "flash.vars"
)

// kind says how to open a file that QEMU inherits.
type kind string

const (
	kindSocket   kind = "socket"    // a listening unix socket in Definition.Dir
	kindPipe     kind = "pipe"      // the read end of a named pipe in Definition.Dir
	kindRead     kind = "read"      // O_RDONLY
	kindWrite    kind = "write"     // O_RDWR
	kindAppend   kind = "append"    // O_WRONLY|O_APPEND|O_CREATE
	kindBoot     kind = "boot"      // O_RDONLY; QEMU's user can open it a second time
	kindTap      kind = "tap"       // a queue of NICs[Index]'s tap
	kindVhost    kind = "vhost"     // /dev/vhost-net
	kindShare    kind = "share"     // a directory, read-write
	kindShareRO  kind = "share-ro"  // a directory, mounted read-only
	kindVirtiofs kind = "virtiofs"  // a connection to Shares[Index]'s virtiofsd
	kindOwnedDir kind = "owned-dir" // a directory in Definition.Dir that QEMU's user owns
	kindMemory   kind = "memory"    // the guest's memory at boot
	kindGrowth   kind = "growth"    // the memory by which the guest grows
)

// inherited is a file that QEMU inherits.
type inherited struct {
	Kind  kind   `json:"kind"`
	Path  string `json:"path,omitempty"`
	Index int    `json:"index,omitempty"`
}

// hostSetup holds the properties of the host that the command line depends on.
type hostSetup struct {
	// Accel is AccelKVM or AccelTCG.
	Accel string
	// VhostNet is set if the kernel moves the packets of taps (vhost-net).
	VhostNet bool
	// Block reports whether a disk's path is a block device.
	Block func(path string) bool
}

// command holds QEMU's arguments and the files that QEMU inherits. The files in Standard become standard input and
// output. Those in Files become the descriptors from firstFD on.
type command struct {
	Args     []string     `json:"args"`
	Standard [2]inherited `json:"standard"`
	Files    []inherited  `json:"files"`
	// Late are the devices to add, in this order, when a saved machine is about to continue.
	Late []map[string]any `json:"late,omitempty"`
}

// build returns the command for a definition that Validate has accepted. The result depends only on the arguments.
func build(d machine.Definition, s hostSetup) command {
	var c command
	c.machine(d, s)
	c.consoles(d)
	if d.UEFI != nil {
		c.node(machine.Disk{ID: flashCode, File: d.UEFI.Code, Format: "raw", ReadOnly: true}, nil, s)
		vars := d.UEFI.Vars
		c.node(machine.Disk{ID: flashVars, File: vars.File, Format: "raw", Offset: vars.Offset, Size: vars.Size}, nil, s)
	}
	for i, disk := range d.Disks {
		c.disk(d, i, disk, s)
	}
	if d.Plug {
		c.add("-device", "virtio-scsi-pci,id="+plugController, "-device",
			fmt.Sprintf("pcie-root-port,id=%s,chassis=1,addr=%#x", plugPort, plugSlot))
	}
	for i, nic := range d.NICs {
		c.nic(d, i, nic, s)
	}
	for i, share := range d.Shares {
		c.share(d, i, share)
	}
	if d.VNC {
		dir := c.inherit(inherited{Kind: kindOwnedDir, Path: filepath.Join(d.Dir, machine.VNCDir)})
		c.add("-device", "VGA", "-vnc", fmt.Sprintf("unix:/proc/self/fd/%d/%s", dir, machine.VNCName))
	}
	if d.Hotplug { // after all other devices, which so keep their PCI slots
		c.add("-device", "pcie-root-port,chassis=1,id="+plugPort)
	}
	if d.Saved != "" {
		c.add("-incoming", "defer")
	}
	return c
}

func (c *command) add(args ...string) { c.Args = append(c.Args, args...) }

// inherit adds a file and returns its descriptor number in QEMU.
func (c *command) inherit(f inherited) int {
	c.Files = append(c.Files, f)
	return firstFD + len(c.Files) - 1
}

// fdset adds a file as a descriptor set and returns the name under which QEMU can open the file.
func (c *command) fdset(f inherited) string {
	fd := c.inherit(f)
	c.add("-add-fd", fmt.Sprintf("fd=%d,set=%d", fd, fd))
	return fmt.Sprintf("/dev/fdset/%d", fd)
}

func (c *command) machine(d machine.Definition, s hostSetup) {
	c.add("-name", "guest="+namePrefix+d.Name+",debug-threads=on",
		"-nodefaults", "-no-user-config", "-display", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-machine", "q35,usb=off,vmport=off,dump-guest-core=off"+memoryBackend(d)+flash(d),
		"-accel", acceleration(s.Accel, d),
		"-cpu", cpuModel(d.CPUModel, s.Accel),
		"-smp", smp(d),
		"-m", memorySize(d),
		"-uuid", d.UUID,
		"-rtc", "base=utc",
		// If the firmware finds no boot device, it tries again after this time. It then reports the failure again, in
		// case a daemon died after it had read the first report.
		"-boot", fmt.Sprintf("strict=on,reboot-timeout=%d", boot.RetryTime.Milliseconds()),
		// A guest that powers off or panics stays paused until the driver has read the reason. A reboot resets the
		// guest.
		"-action", "reboot=reset,shutdown=pause,panic=pause",
		// Disable suspend, because nothing could wake the guest.
		"-global", "ICH9-LPC.disable_s3=1", "-global", "ICH9-LPC.disable_s4=1")
	switch {
	case d.Plug:
		// QEMU opens the file again, which gives the driver's file to the guest.
		c.add("-object", fmt.Sprintf("memory-backend-file,id=%s,size=%dM,mem-path=/proc/self/fd/%d,share=on", memoryID, mebibytes(d.BootMemory()),
			c.inherit(inherited{Kind: kindMemory})))
	case d.HasVirtiofs():
		c.add("-object", fmt.Sprintf("memory-backend-memfd,id=%s,size=%dM,share=on", memoryID, mebibytes(d.Memory)))
	}
	if d.Kernel != nil {
		// QEMU opens the kernel and the initrd with fopen, which does not support descriptor sets.
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
		"-device", "virtio-balloon-pci,id=balloon,free-page-reporting=on")
	if d.Growth != nil {
		c.growth(d)
	}
}

// growth adds the device by which the machine's memory grows. Like the machine's other memory, its memory is a file: so it is
// not in a saved state, and virtiofsd can use it. A machine that continues has grown by nothing yet; see run.resume.
func (c *command) growth(d machine.Definition) {
	_, requested := grown(d, d.Memory)
	if d.Saved != "" {
		requested = 0
	}
	c.add("-object", fmt.Sprintf("memory-backend-file,id=%s,size=%d,mem-path=/proc/self/fd/%d,share=on,reserve=off", growthMemory,
		growthRegion(d), c.inherit(inherited{Kind: kindGrowth})),
		"-device", fmt.Sprintf("virtio-mem-pci,id=%s,memdev=%s,requested-size=%d", growthID, growthMemory, requested))
}

// smp returns the option for the number of CPUs.
func smp(d machine.Definition) string {
	if d.Growth != nil {
		return fmt.Sprintf("%d,maxcpus=%d", d.CPUs, d.Growth.CPUs)
	}
	return strconv.Itoa(d.CPUs)
}

// memorySize returns the option for the size of the memory.
func memorySize(d machine.Definition) string {
	if d.Growth != nil {
		return fmt.Sprintf("size=%dM,maxmem=%dM", mebibytes(d.Growth.Boot), mebibytes(d.Growth.Memory))
	}
	return fmt.Sprintf("%dM", mebibytes(d.Memory))
}

// consoles adds the monitor, the serial console and the ports of the agents. The serial console is QEMU's standard
// input (a pipe) and output (a file). A socket would be unsuitable: when the client of the socket stopped reading, QEMU
// would close the socket and so lose the input. QEMU 7.2 would also log a byte twice if the client was not ready for
// that byte.
func (c *command) consoles(d machine.Definition) {
	socket := func(id, name string) {
		fd := c.inherit(inherited{Kind: kindSocket, Path: filepath.Join(d.Dir, name)})
		c.add("-chardev", fmt.Sprintf("socket,id=%s,fd=%d,server=on,wait=off", id, fd))
	}
	socket("monitor", monitorSocket)
	c.add("-mon", "chardev=monitor,mode=control")
	c.Standard = [2]inherited{{Kind: kindPipe, Path: filepath.Join(d.Dir, machine.SerialInput)}, {Kind: kindAppend, Path: d.SerialLog}}
	c.add("-chardev", "stdio,id=serial,signal=off", "-device", "isa-serial,chardev=serial", "-device", "virtio-serial-pci,id=ports")
	c.add("-chardev", fmt.Sprintf("ringbuf,id=%s,size=%d", firmwareRing, boot.RingSize),
		"-device", fmt.Sprintf("isa-debugcon,iobase=%#x,chardev=%s", boot.Port, firmwareRing))
	socket("agent", machine.AgentSocket)
	c.add("-device", "virtserialport,bus=ports.0,chardev=agent,name="+wire.PortName)
	socket("qga", machine.QGASocket)
	c.add("-device", "virtserialport,bus=ports.0,chardev=qga,name=org.qemu.guest_agent.0")
	if d.SessionPorts {
		for i, name := range machine.SessionSockets {
			id := fmt.Sprintf("sessions%d", i)
			socket(id, name)
			c.add("-device", fmt.Sprintf("virtserialport,bus=ports.0,chardev=%s,name=%s", id, wire.SessionPortNames[i]))
		}
	}
}

// disk adds a disk as QEMU block nodes. The format and the overlay's base come from the definition, never from the
// headers of the files (fault I5).
func (c *command) disk(d machine.Definition, i int, disk machine.Disk, s hostSetup) {
	var backing any // null makes QEMU ignore any base that the overlay's header names
	if disk.Base != nil {
		backing = disk.ID + "-base"
		c.node(machine.Disk{ID: disk.ID + "-base", File: disk.Base.File, Format: disk.Base.Format, ReadOnly: true}, nil, s)
	}
	c.node(disk, backing, s)
	device := "virtio-blk-pci"
	switch disk.Bus {
	case machine.BusCDROM:
		device = "ide-cd,bus=ide.0"
	case machine.BusSCSI:
		if !slices.ContainsFunc(d.Disks[:i], func(d machine.Disk) bool { return d.Bus == machine.BusSCSI }) {
			c.add("-device", "virtio-scsi-pci,id=scsi")
		}
		device = "scsi-hd,bus=scsi.0"
	}
	device += fmt.Sprintf(",drive=%s,id=disk-%s,serial=%s", disk.ID, disk.ID, disk.ID)
	if disk.LogicalBlock > 0 {
		device += fmt.Sprintf(",logical_block_size=%d,physical_block_size=%d", disk.LogicalBlock, disk.PhysicalBlock)
	}
	if !disk.ReadOnly {
		// Report errors from a full or broken disk to the guest. Otherwise QEMU would pause the guest forever.
		device += ",werror=report,rerror=report"
	}
	if order := d.BootOrder(i); order > 0 {
		device += fmt.Sprintf(",bootindex=%d", order)
	}
	c.add("-device", device)
}

// node adds a format node named after the disk's ID, on top of a node for the disk's file.
func (c *command) node(disk machine.Disk, backing any, s hostSetup) {
	driver, open := "file", kindWrite
	if s.Block(disk.Path) {
		driver = "host_device"
	}
	if disk.ReadOnly {
		open = kindRead
	}
	file := map[string]any{
		"driver": driver, "node-name": disk.ID + "-file", "filename": c.fdset(inherited{Kind: open, Path: disk.Path}),
		"read-only": disk.ReadOnly, "discard": "unmap",
	}
	if disk.ID == flashVars && disk.Size > 0 {
		// The root disk's node locks the device that both nodes write to. The writes go through the page cache, because
		// the firmware programs single bytes: a first boot makes 16,000 writes. A guest's flush of its root disk writes
		// the variables to the device, too.
		file["locking"] = "off"
	}
	c.blockdev(file)
	node := map[string]any{"driver": disk.Format, "node-name": disk.ID, "file": disk.ID + "-file", "read-only": disk.ReadOnly,
		"discard": "unmap"}
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
		panic(err) // impossible for strings, numbers, booleans and nil
	}
	c.add("-blockdev", string(raw))
}

func (c *command) nic(d machine.Definition, i int, nic machine.NIC, s hostSetup) {
	netdev := fmt.Sprintf("tap,id=net%d,fd=%d", i, c.inherit(inherited{Kind: kindTap, Index: i}))
	if s.VhostNet {
		netdev += fmt.Sprintf(",vhost=on,vhostfd=%d", c.inherit(inherited{Kind: kindVhost, Path: vhostNet}))
	}
	// Without a ROM, the interface is not a boot device and needs no iPXE.
	device := []property{{"netdev", fmt.Sprintf("net%d", i)}, {"id", fmt.Sprintf("nic%d", i)}, {"mac", nic.MAC}, {"romfile", ""}}
	if nic.MTU > 0 {
		device = append(device, property{"host_mtu", nic.MTU})
	}
	c.add("-netdev", netdev)
	if d.Saved != "" {
		c.late("virtio-net-pci", device)
		return
	}
	c.device("virtio-net-pci", device)
}

// property is a property of a device.
type property struct {
	name  string
	value any
}

// device adds a device to the command line.
func (c *command) device(driver string, properties []property) {
	for _, p := range properties {
		driver += fmt.Sprintf(",%s=%v", p.name, p.value)
	}
	c.add("-device", driver)
}

// late adds a device that is to be plugged in, as a function of the slot for such devices. The guest looks for devices once
// function 0 is there, so that is the last one.
func (c *command) late(driver string, properties []property) {
	device := map[string]any{"driver": driver, "bus": plugPort, "multifunction": true}
	for _, p := range properties {
		device[p.name] = p.value
	}
	c.Late = append(c.Late, device)
	for i, device := range c.Late {
		device["addr"] = fmt.Sprintf("0.%d", (i+1)%len(c.Late))
	}
}

// memoryID is the ID of the guest's memory backend when QEMU shares the memory with virtiofsd.
const memoryID = "ram"

// memoryBackend returns the -machine option that names the memory backend.
func memoryBackend(d machine.Definition) string {
	if d.Plug || d.HasVirtiofs() {
		return ",memory-backend=" + memoryID
	}
	return ""
}

// flash returns the -machine option that names the block nodes of the flash chips.
func flash(d machine.Definition) string {
	if d.UEFI != nil {
		return ",pflash0=" + flashCode + ",pflash1=" + flashVars
	}
	return ""
}

// share adds a shared directory: a connection to its virtiofsd, or a directory that QEMU serves by virtio-9p. With the
// security model "none", QEMU's user owns the files that the guest creates, because QEMU ignores a failure to change
// the owner of a new file. The comment on virtiofsd.Open says which owners QEMU sees. With "mapped-xattr", QEMU's user
// owns these files too, and extended attributes hold the owners that the guest sees.
func (c *command) share(d machine.Definition, i int, share machine.Share) {
	if share.Driver == machine.ShareVirtiofs {
		fd := c.inherit(inherited{Kind: kindVirtiofs, Index: i})
		c.add("-chardev", fmt.Sprintf("socket,id=share%d,fd=%d", i, fd))
		device := []property{{"chardev", fmt.Sprintf("share%d", i)}, {"tag", share.Tag}, {"queue-size", 1024}}
		if d.Saved != "" {
			c.late("vhost-user-fs-pci", device)
			return
		}
		c.device("vhost-user-fs-pci", append(device, property{"multifunction", "on"}, property{"addr", shareAddress(i)}))
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
		"-device", fmt.Sprintf("virtio-9p-pci,fsdev=share%d,mount_tag=%s,multifunction=on,addr=%s", i, share.Tag, shareAddress(i)))
}

const (
	// lastShareSlot is the last free PCI slot. Shares fill the slots from lastShareSlot downward, because QEMU puts
	// other devices into the slots from the first one upward.
	lastShareSlot = 0x1e
	perSlot       = 8
	// maxShares limits the shares to eight slots, which leaves 22 slots for other devices.
	maxShares = 64
	// plugSlot is the slot below those of the shares. It has the port for the devices that a saved machine gets.
	plugSlot = lastShareSlot - maxShares/perSlot
)

// shareAddress returns the PCI address of the share with the given index. Each slot holds eight shares, because there
// are only 30 slots for all devices, and a pod can have many volumes.
func shareAddress(i int) string {
	return fmt.Sprintf("%#x.%d", lastShareSlot-i/perSlot, i%perSlot)
}

func acceleration(accel string, d machine.Definition) string {
	if accel == AccelKVM {
		return "kvm"
	}
	tcg := "tcg,tb-size=32" // QEMU's default, up to 1 GiB of translated code, is too much for many small guests
	if canAddEmulated(d) {
		tcg += ",thread=single"
	}
	return tcg
}

// canAddEmulated reports whether CPUs can be added to an emulated machine. With several threads, QEMU 7.2 ends with a failed
// assertion if a CPU comes when there is no room for its translated code (tcg_region_initial_alloc). One thread is enough for
// the CPU with which such a machine starts.
func canAddEmulated(d machine.Definition) bool { return d.Growth != nil && d.CPUs == 1 }

// cpuModel returns the definition's CPU model, or the default model. Under KVM, the default is the host's model.
// Otherwise it is the model with all features that QEMU emulates.
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

// isCommandOf reports whether cmdline, the content of /proc/PID/cmdline, belongs to the machine's QEMU.
func isCommandOf(cmdline []byte, name string) bool {
	return strings.Contains("\x00"+string(cmdline), "\x00guest="+namePrefix+name+",")
}

// IsMachine reports whether the process is the QEMU of the named machine.
func IsMachine(pid int, name string) bool {
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && isCommandOf(cmdline, name)
}
