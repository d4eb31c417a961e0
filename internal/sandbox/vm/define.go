package vm

import (
	"encoding/hex"
	"fmt"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

const (
	// rootID is the root disk's, and its serial number in the guest.
	rootID = "root"
	// minMemory is the least memory in bytes that a guest can be given: a kernel fits, and can say that it has too little.
	minMemory = 16 << 20
	// defaultCmdline is the command line of a kernel whose image says none: what it says goes to the pod's log.
	defaultCmdline = "console=ttyS0"
)

// definition is the machine.
func (b *Backend) definition(o *order) (machine.Definition, error) {
	id, res := o.container.ID, o.container.Config.GetLinux().GetResources()
	d := machine.Definition{
		Name: id, UUID: o.options.SystemUUID, Dir: b.cfg.machineDir(id), StateDir: b.cfg.diskDir(id),
		CPUs: b.cpus(o, res), CPUModel: o.options.CPUModel, Memory: b.memory(res),
		SerialLog: b.cfg.serialLog(id), UID: o.at.state.UID, GID: o.at.state.UID, Cgroup: o.at.state.Cgroup,
		LibvirtCPU: o.options.LibvirtCPU, VNC: o.options.VNC, Shares: o.volumes.shares,
	}
	if d.UUID == "" {
		d.UUID = uuidOf(id)
	}
	switch {
	case o.volumes.root != "":
		d.Disks = append(d.Disks, machine.Disk{
			ID: rootID, File: machine.File{Path: o.volumes.root}, Format: "raw", Offset: o.root.Offset, Size: o.root.Size, Bus: o.options.DiskBus,
		})
	case o.files.Disk != nil:
		d.Disks = append(d.Disks, machine.Disk{
			ID: rootID, File: machine.File{Path: b.cfg.overlayFile(id)}, Format: "qcow2", Bus: o.options.DiskBus,
			Base: &machine.Base{File: machine.File{Path: o.files.DiskPath}, Format: o.files.Format},
		})
	}
	for _, disk := range o.volumes.disks {
		disk.Bus = o.options.DiskBus
		d.Disks = append(d.Disks, disk)
	}
	d.Disks = append(d.Disks, readOnlyDisk("cidata", b.cfg.cloudInitFile(id), o.options.DiskBus))
	if b.cfg.AgentDisk != "" {
		d.Disks = append(d.Disks, readOnlyDisk("agent", b.cfg.AgentDisk, o.options.DiskBus))
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
	if d.LibvirtCPU != "" && b.cfg.Driver.Name() != "libvirt" {
		return d, fields.Unsupported("annotation VirtletLibvirtCPUSetting", `the driver here is %q; name a model with VirtletCPUModel, or set vm.driver = "libvirt"`, b.cfg.Driver.Name())
	}
	return d, nil
}

func readOnlyDisk(id, path string, bus machine.Bus) machine.Disk {
	return machine.Disk{ID: id, File: machine.File{Path: path}, Format: "raw", ReadOnly: true, Bus: bus}
}

// cpus are the annotation's, else as many as the quota can keep busy, else the default.
func (b *Backend) cpus(o *order, res *runtimeapi.LinuxContainerResources) int {
	if o.options.VCPUsSet {
		return o.options.VCPUs
	}
	quota, period := res.GetCpuQuota(), res.GetCpuPeriod()
	if period <= 0 {
		period = 100_000
	}
	if quota > 0 {
		return int((quota + period - 1) / period)
	}
	return b.cfg.VM.DefaultCPUs
}

// memory is the guest's RAM in bytes: the container's limit in whole MiB, or the default.
func (b *Backend) memory(res *runtimeapi.LinuxContainerResources) uint64 {
	if limit := res.GetMemoryLimitInBytes(); limit > 0 {
		return uint64(limit) &^ (1<<20 - 1)
	}
	return b.cfg.VM.DefaultMemory
}

// cmdline is the image's command line, with the container's arguments behind it.
func cmdline(line string, args []string) string {
	if line == "" {
		line = defaultCmdline
	}
	return strings.Join(append([]string{line}, args...), " ")
}

// uuidOf makes an UUID (version 8 of RFC 9562) of an ID of hex digits.
func uuidOf(id string) string {
	raw, err := hex.DecodeString(id[:32])
	if err != nil {
		raw = make([]byte, 16)
	}
	raw[6], raw[8] = raw[6]&0x0f|0x80, raw[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", raw[:4], raw[4:6], raw[6:8], raw[8:10], raw[10:])
}
