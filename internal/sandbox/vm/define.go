package vm

import (
	"encoding/hex"
	"fmt"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/vm/guestinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
)

const (
	// rootID and cdromID are the IDs of the root disk and the CD-ROM, and their serial numbers in the guest.
	rootID, cdromID = "root", "cdrom"
	// minUEFIMemory is the minimum memory in bytes of a guest that boots by UEFI. With 32 MiB, OVMF stops with an exception
	// before it reports anything; with 48 MiB, it still boots.
	minUEFIMemory = 64 << 20
	// maxCPUs is the maximum number of CPUs that a machine has by its request. For more, QEMU would need an IOMMU.
	maxCPUs = 255
	// defaultCmdline is used for images without a command line. It sends the kernel's messages to the container's log.
	defaultCmdline = "console=ttyS0"
)

// definition returns the machine's definition for the driver.
func (b *Backend) definition(o *plan) (machine.Definition, error) {
	id, res := o.container.ID, sandbox.Resources(o.pod, o.container)
	d := machine.Definition{
		Name: id, UUID: o.options.SystemUUID, Dir: b.cfg.machineDir(id), StateDir: b.cfg.diskDir(id),
		CPUs: b.cpus(o.options, res), CPUModel: o.options.CPUModel, Memory: b.memory(res),
		SerialLog: b.cfg.serialLog(id), UID: o.sandbox.state.UID, GID: o.sandbox.state.UID, Cgroup: o.sandbox.state.Cgroup,
		LibvirtCPU: o.options.LibvirtCPU, VNC: o.options.VNC, Shares: o.volumes.Shares, SessionPorts: true, UEFI: o.uefi,
		Plug: b.cfg.Plug || o.like != "",
	}
	if d.UUID == "" {
		d.UUID = uuidOf(id)
	}
	if b.cfg.Plug {
		d.Growth = resources.Growth(d.Memory, d.CPUs)
	}
	switch {
	case o.volumes.Root != "":
		d.Disks = append(d.Disks, machine.Disk{
			ID: rootID, File: machine.File{Path: o.volumes.Root}, Format: "raw", Offset: o.root.Offset, Size: o.root.Size, Bus: o.options.DiskBus,
		})
	case o.cdrom:
		d.Disks = append(d.Disks, readOnlyDisk(cdromID, o.files.DiskPath, machine.BusCDROM))
	case o.files.Disk != nil:
		d.Disks = append(d.Disks, machine.Disk{
			ID: rootID, File: machine.File{Path: b.cfg.overlayFile(id)}, Format: "qcow2", Bus: o.options.DiskBus,
			Base: &machine.Base{File: machine.File{Path: o.files.DiskPath}, Format: o.files.Format},
		})
	}
	for _, disk := range o.volumes.Disks {
		disk.Bus = o.options.DiskBus
		d.Disks = append(d.Disks, disk)
	}
	if !b.cfg.Plug {
		cidata := readOnlyDisk("cidata", b.cfg.cloudInitFile(id), o.options.DiskBus)
		if o.like != "" {
			cidata.Like, cidata.Size = o.like, cloudInitRoom
			o.markDisks(d.Disks)
		}
		d.Disks = append(d.Disks, cidata)
	}
	if b.cfg.AgentDisk != "" {
		d.Disks = append(d.Disks, readOnlyDisk("agent", b.cfg.AgentDisk, o.options.DiskBus))
	}
	if b.cfg.GuestDisk != "" {
		d.Disks = append(d.Disks, readOnlyDisk(guestinit.RootDisk, b.cfg.GuestDisk, machine.BusVirtio))
	}
	if o.files.Kernel != nil {
		d.Kernel = &machine.File{Path: o.files.KernelPath}
		d.Cmdline = cmdline(o.files.Cmdline, o.container.Config.GetArgs())
	}
	if o.files.Initrd != nil {
		d.Initrd = &machine.File{Path: o.files.InitrdPath}
	}
	for _, n := range o.interfaces {
		d.NICs = append(d.NICs, machine.NIC{MAC: n.MAC, MTU: n.MTU, Netns: o.pod.Netns, Tap: n.Tap})
	}
	d.Hotplug = !d.Plug && len(d.Disks)+len(d.NICs) <= hotplugSlots
	if d.LibvirtCPU != "" && b.cfg.Driver.Name() != "libvirt" {
		return d, fields.Unsupported("annotation VirtletLibvirtCPUSetting",
			`this node's driver is %q; name a model with VirtletCPUModel, or set vm.driver = "libvirt"`, b.cfg.Driver.Name())
	}
	return d, nil
}

func readOnlyDisk(id, path string, bus machine.Bus) machine.Disk {
	return machine.Disk{ID: id, File: machine.File{Path: path}, Format: "raw", ReadOnly: true, Bus: bus}
}

// cpus returns the number of CPUs. The number comes from the annotation. If there is no annotation, cpus rounds up the
// quota. If there is no quota either, as with exclusive CPUs, cpus rounds up the request, which the node's CPUs and the default
// in the configuration bound.
func (b *Backend) cpus(o annotations.Options, res *runtimeapi.LinuxContainerResources) int {
	if o.VCPUsSet {
		return o.VCPUs
	}
	if quota := resources.QuotaOf(res); quota > 0 {
		return resources.CPUsOf(quota)
	}
	const cpu = 1024 // shares
	return max(b.cfg.VM.DefaultCPUs, int(min((res.GetCpuShares()+cpu-1)/cpu, int64(resources.NodeCPUs()), maxCPUs)))
}

// memory returns the guest's RAM in bytes: the container's limit in whole MiB, or the default.
func (b *Backend) memory(res *runtimeapi.LinuxContainerResources) uint64 {
	if limit := res.GetMemoryLimitInBytes(); limit > 0 {
		return resources.WholeMiB(uint64(limit))
	}
	return b.cfg.VM.DefaultMemory
}

// checkUEFIMemory refuses a guest's RAM in bytes if it is too little for UEFI.
func checkUEFIMemory(memory uint64) error {
	if memory < minUEFIMemory {
		return fields.Invalid("linux.resources.memory_limit_in_bytes",
			"the machine boots by UEFI, which needs %d bytes of memory, but has %d from this limit or, without a limit, from vm.default_memory",
			minUEFIMemory, memory)
	}
	return nil
}

// cmdline returns the image's command line followed by the container's arguments.
func cmdline(line string, args []string) string {
	if line == "" {
		line = defaultCmdline
	}
	return strings.Join(append([]string{line}, args...), " ")
}

// uuidOf derives a UUID (version 8 of RFC 9562) from an ID of hex digits.
func uuidOf(id string) string {
	raw, err := hex.DecodeString(id[:32])
	if err != nil {
		raw = make([]byte, 16)
	}
	raw[6], raw[8] = raw[6]&0x0f|0x80, raw[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", raw[:4], raw[4:6], raw[6:8], raw[8:10], raw[10:])
}
