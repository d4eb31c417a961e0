package libvirt

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"
	"golang.org/x/sys/unix"
	"libvirt.org/go/libvirtxml"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
)

// namePrefix is the prefix of our domains' names.
const namePrefix = "tripod-"

// metadataURI is the XML namespace of our element in a domain's <metadata>.
const metadataURI = "https://tripod.dev/xmlns/machine/1"

func domainName(name string) string { return namePrefix + name }

// uuidText returns the text form of a UUID (RFC 9562).
func uuidText(u golibvirt.UUID) string {
	s := hex.EncodeToString(u[:])
	return strings.Join([]string{s[:8], s[8:12], s[12:16], s[16:20], s[20:]}, "-")
}

// metadata is our element in a domain: the owner and the machine's definition.
type metadata struct {
	XMLName    xml.Name
	Owner      string `xml:"owner,attr"`
	Definition string `xml:"definition"`
}

// validate refuses a definition that QEMU or a domain does not support.
func (d *Driver) validate(def machine.Definition) error {
	plain := def
	plain.LibvirtCPU = ""
	if err := qemu.Validate(plain); err != nil {
		return err
	}
	if len(def.NICs) > vmwrap.MaxNICs {
		return fmt.Errorf("machine %s: %d network interfaces are more than the %d that the driver libvirt can add: %w", def.Name, len(def.NICs),
			vmwrap.MaxNICs, errdefs.ErrInvalidArgument)
	}
	if def.UEFI != nil && def.UEFI.Vars.Size != 0 {
		return fmt.Errorf("machine %s: the driver libvirt cannot keep UEFI variables on the root disk's device; use the driver qmp, or create the container again: %w", def.Name, errdefs.ErrNotImplemented)
	}
	_, err := d.cpu(def)
	return err
}

// domainXML returns the XML of a machine's domain, without the network, which the wrapper adds. The secret is for the
// next start. If the secret is "", the XML omits the wrapper's variables. The model is the result of securityModel.
func (d *Driver) domainXML(def machine.Definition, secret, model string) (string, error) {
	record, err := json.Marshal(def)
	if err != nil {
		return "", err
	}
	var mark bytes.Buffer
	encoder := xml.NewEncoder(&mark)
	if err := encoder.Encode(metadata{XMLName: xml.Name{Space: metadataURI, Local: "machine"}, Owner: d.cfg.Owner,
		Definition: string(record)}); err != nil {
		return "", err
	}
	cpu, err := d.cpu(def)
	if err != nil {
		return "", err
	}
	domain := libvirtxml.Domain{
		Type:     map[string]string{qemu.AccelKVM: "kvm", qemu.AccelTCG: "qemu"}[d.cfg.Accel],
		Name:     domainName(def.Name),
		UUID:     def.UUID,
		Metadata: &libvirtxml.DomainMetadata{XML: mark.String()},
		Memory:   &libvirtxml.DomainMemory{Value: uint(def.Memory), Unit: "b", DumpCore: "off"},
		VCPU:     &libvirtxml.DomainVCPU{Value: uint(def.CPUs)},
		CPU:      cpu,
		OS:       d.boot(def),
		Features: &libvirtxml.DomainFeatureList{ACPI: &libvirtxml.DomainFeature{}, APIC: &libvirtxml.DomainFeatureAPIC{},
			VMPort: &libvirtxml.DomainFeatureState{State: "off"}},
		Clock: &libvirtxml.DomainClock{Offset: "utc"},
		// After a panic, the domain stays crashed until the driver has noticed the crash. A reboot does not end the
		// domain.
		OnPoweroff: "destroy", OnReboot: "restart", OnCrash: "preserve",
		// Disable suspend, because nothing could wake the guest.
		PM: &libvirtxml.DomainPM{
			SuspendToMem:  &libvirtxml.DomainPMPolicy{Enabled: "no"},
			SuspendToDisk: &libvirtxml.DomainPMPolicy{Enabled: "no"},
		},
		Devices: d.devices(def),
		SecLabel: []libvirtxml.DomainSecLabel{{Type: "static", Model: "dac", Relabel: "no",
			Label: fmt.Sprintf("+%d:+%d", def.UID, d.group(def))}},
	}
	if d.cfg.Accel == qemu.AccelTCG {
		// Limit the cache of translated code. QEMU's default, up to 1 GiB, is too much for many small guests.
		domain.Features.TCG = &libvirtxml.DomainFeatureTCG{TBCache: &libvirtxml.DomainFeatureTCGTBCache{Size: 32, Unit: "MiB"}}
	}
	if def.HasVirtiofs() {
		domain.MemoryBacking = &libvirtxml.DomainMemoryBacking{
			MemorySource: &libvirtxml.DomainMemorySource{Type: "memfd"}, MemoryAccess: &libvirtxml.DomainMemoryAccess{Mode: "shared"},
		}
	}
	if model == "apparmor" || model == "selinux" {
		// Disable libvirt's security profile, which assumes that libvirt executes QEMU itself and that QEMU opens its
		// disks.
		domain.SecLabel = append(domain.SecLabel, libvirtxml.DomainSecLabel{Type: "none", Model: model})
	}
	if secret != "" {
		domain.QEMUCommandline = &libvirtxml.DomainQEMUCommandline{Envs: []libvirtxml.DomainQEMUCommandlineEnv{
			{Name: vmwrap.SocketVar, Value: d.layout.socket()},
			{Name: vmwrap.MachineVar, Value: def.Name},
			{Name: vmwrap.SecretVar, Value: secret},
		}}
	}
	return domain.Marshal()
}

// group returns QEMU's group. If only root and the group of /dev/kvm can access /dev/kvm, QEMU runs with that group
// instead of the definition's group, because libvirt sets no supplementary groups.
func (d *Driver) group(def machine.Definition) int {
	var st unix.Stat_t
	if d.cfg.Accel == qemu.AccelKVM && unix.Stat("/dev/kvm", &st) == nil && st.Mode&0o066 == 0o060 && st.Gid != 0 {
		return int(st.Gid)
	}
	return def.GID
}

// cpu returns the definition's <cpu> element or CPU model, or the default model. Under KVM, the default has all
// features of the host. Otherwise it has all features that QEMU emulates.
func (d *Driver) cpu(def machine.Definition) (*libvirtxml.DomainCPU, error) {
	if def.LibvirtCPU != "" {
		var cpu libvirtxml.DomainCPU
		if err := cpu.Unmarshal(def.LibvirtCPU); err != nil {
			return nil, fmt.Errorf("%q is not a <cpu> element of a libvirt domain: %w: %w", def.LibvirtCPU, err, errdefs.ErrInvalidArgument)
		}
		return &cpu, nil
	}
	switch model := def.CPUModel; {
	case model == "host-model" && d.cfg.Accel == qemu.AccelKVM:
		return &libvirtxml.DomainCPU{Mode: "host-model", Check: "none"}, nil
	case model == "" || model == "host-model" || model == "host-passthrough" || model == "host" || model == "max":
		if d.cfg.Accel == qemu.AccelKVM {
			return &libvirtxml.DomainCPU{Mode: "host-passthrough", Check: "none"}, nil
		}
		return &libvirtxml.DomainCPU{Mode: "maximum", Check: "none"}, nil
	default:
		return &libvirtxml.DomainCPU{Mode: "custom", Match: "exact", Check: "none",
			Model: &libvirtxml.DomainCPUModel{Value: model, Fallback: "forbid"}}, nil
	}
}

func (d *Driver) boot(def machine.Definition) *libvirtxml.DomainOS {
	os := &libvirtxml.DomainOS{Type: &libvirtxml.DomainOSType{Arch: "x86_64", Machine: "q35", Type: "hvm"}}
	retry := int(boot.RetryTime.Milliseconds())
	os.BIOS = &libvirtxml.DomainBIOS{RebootTimeout: &retry}
	if def.UEFI != nil {
		os.Loader = &libvirtxml.DomainLoader{Path: d.layout.placeholder(def.Name, codeName), Readonly: "yes", Type: "pflash"}
		os.NVRam = &libvirtxml.DomainNVRam{NVRam: d.layout.placeholder(def.Name, varsName)}
	}
	if def.Kernel == nil {
		return os
	}
	os.Kernel, os.Cmdline = d.layout.placeholder(def.Name, kernelName), def.Cmdline
	if def.Initrd != nil {
		os.Initrd = d.layout.placeholder(def.Name, initrdName)
	}
	return os
}

func (d *Driver) devices(def machine.Definition) *libvirtxml.DomainDeviceList {
	port, debug, ioport, null := uint(0), uint(1), uint(boot.Port),
		&libvirtxml.DomainChardevSource{Null: &libvirtxml.DomainChardevSourceNull{}}
	channel := func(name string) libvirtxml.DomainChannel {
		return libvirtxml.DomainChannel{Source: null,
			Target: &libvirtxml.DomainChannelTarget{VirtIO: &libvirtxml.DomainChannelTargetVirtIO{Name: name}}}
	}
	list := &libvirtxml.DomainDeviceList{
		Emulator:    d.layout.emulator,
		Controllers: []libvirtxml.DomainController{{Type: "usb", Model: "none"}, {Type: "virtio-serial"}},
		Serials: []libvirtxml.DomainSerial{
			{Source: null, Target: &libvirtxml.DomainSerialTarget{Type: "isa-serial", Port: &port}},
			{
				Source: null, Target: &libvirtxml.DomainSerialTarget{Type: "isa-debug", Port: &debug,
					Model: &libvirtxml.DomainSerialTargetModel{Name: "isa-debugcon"}},
				Address: &libvirtxml.DomainAddress{ISA: &libvirtxml.DomainAddressISA{IOBase: &ioport}},
			},
		},
		Channels:   []libvirtxml.DomainChannel{channel(wire.PortName), channel(qgaPort)},
		Videos:     []libvirtxml.DomainVideo{{Model: libvirtxml.DomainVideoModel{Type: "none"}}},
		MemBalloon: &libvirtxml.DomainMemBalloon{Model: "virtio", FreePageReporting: "on"},
		RNGs: []libvirtxml.DomainRNG{{Model: "virtio",
			Backend: &libvirtxml.DomainRNGBackend{BuiltIn: &libvirtxml.DomainRNGBackendBuiltIn{}}}},
		Panics: []libvirtxml.DomainPanic{{Model: "isa"}},
	}
	if def.SessionPorts {
		for _, name := range wire.SessionPortNames {
			list.Channels = append(list.Channels, channel(name))
		}
	}
	if def.VNC {
		list.Videos[0].Model = libvirtxml.DomainVideoModel{Type: "vga"}
		list.Graphics = []libvirtxml.DomainGraphic{{VNC: &libvirtxml.DomainGraphicVNC{Socket: d.layout.placeholder(def.Name, vncName) + "/" +
			machine.VNCName}}}
	}
	counts := map[machine.Bus]int{}
	for i, disk := range def.Disks {
		list.Disks = append(list.Disks, d.disk(def, i, counts[disk.Bus]))
		counts[disk.Bus]++
	}
	if counts[machine.BusSCSI] > 0 {
		list.Controllers = append(list.Controllers, libvirtxml.DomainController{Type: "scsi", Model: "virtio-scsi"})
	}
	for i, share := range def.Shares {
		if share.Driver == machine.ShareVirtiofs {
			list.Filesystems = append(list.Filesystems, libvirtxml.DomainFilesystem{
				Driver: &libvirtxml.DomainFilesystemDriver{Type: "virtiofs", Queue: 1024},
				Source: &libvirtxml.DomainFilesystemSource{Mount: &libvirtxml.DomainFilesystemSourceMount{Socket: d.layout.placeholder(def.Name,
					shareName(i))}},
				Target: &libvirtxml.DomainFilesystemTarget{Dir: share.Tag},
			})
			continue
		}
		fs := libvirtxml.DomainFilesystem{
			AccessMode: map[machine.ShareDriver]string{machine.Share9p: "squash", machine.Share9pMapped: "mapped"}[share.Driver], MultiDevs: "remap",
			Source: &libvirtxml.DomainFilesystemSource{Mount: &libvirtxml.DomainFilesystemSourceMount{Dir: d.layout.placeholder(def.Name,
				shareName(i))}},
			Target: &libvirtxml.DomainFilesystemTarget{Dir: share.Tag},
		}
		if share.ReadOnly {
			fs.ReadOnly = &libvirtxml.DomainFilesystemReadOnly{}
		}
		list.Filesystems = append(list.Filesystems, fs)
	}
	return list
}

// qgaPort is the name of the QEMU guest agent's port.
const qgaPort = "org.qemu.guest_agent.0"

// disk returns the machine's disk with index i, which is the nth disk on its bus, counted from 0. Formats and bases
// come from the definition, never from the headers of the files (fault I5).
func (d *Driver) disk(def machine.Definition, i, nth int) libvirtxml.DomainDisk {
	source := def.Disks[i]
	disk := libvirtxml.DomainDisk{
		Device: "disk",
		Driver: &libvirtxml.DomainDiskDriver{Name: "qemu", Type: source.Format, Discard: "unmap"},
		Source: fileSource(d.layout.placeholder(def.Name, source.ID)),
		Target: targetName(source.Bus, nth),
		Serial: source.ID,
		// An empty element means that there is no base. Without the element, libvirt would search the file's header for
		// a base.
		BackingStore: &libvirtxml.DomainDiskBackingStore{},
	}
	switch source.Bus {
	case machine.BusCDROM:
		disk.Device = "cdrom"
	case machine.BusSCSI:
		// Make each disk a target of its own, as the driver qmp does. If the disks were units of a single target, Linux
		// would list them in another order.
		var zero uint
		target := uint(nth)
		disk.Address = &libvirtxml.DomainAddress{Drive: &libvirtxml.DomainAddressDrive{Controller: &zero, Bus: &zero, Target: &target,
			Unit: &zero}}
	}
	if source.LogicalBlock > 0 {
		disk.BlockIO = &libvirtxml.DomainDiskBlockIO{LogicalBlockSize: uint(source.LogicalBlock), PhysicalBlockSize: uint(source.PhysicalBlock)}
	}
	if source.Size > 0 {
		disk.Source.Slices = &libvirtxml.DomainDiskSlices{Slices: []libvirtxml.DomainDiskSlice{
			{Type: "storage", Offset: uint(source.Offset), Size: uint(source.Size)},
		}}
	}
	if source.Base != nil {
		disk.BackingStore = &libvirtxml.DomainDiskBackingStore{
			Format:       &libvirtxml.DomainDiskFormat{Type: source.Base.Format},
			Source:       fileSource(d.layout.placeholder(def.Name, source.ID+baseSuffix)),
			BackingStore: &libvirtxml.DomainDiskBackingStore{},
		}
	}
	if source.ReadOnly {
		disk.ReadOnly = &libvirtxml.DomainDiskReadOnly{}
	} else {
		// Report errors from a full or broken disk to the guest. Otherwise libvirt would pause the guest forever.
		disk.Driver.ErrorPolicy, disk.Driver.RErrorPolicy = "report", "report"
	}
	if order := def.BootOrder(i); order > 0 {
		disk.Boot = &libvirtxml.DomainDeviceBoot{Order: uint(order)}
	}
	return disk
}

func fileSource(path string) *libvirtxml.DomainDiskSource {
	return &libvirtxml.DomainDiskSource{File: &libvirtxml.DomainDiskSourceFile{File: path}}
}

// targetName returns libvirt's name for the nth disk on a bus, counted from 0: vda … vdz, vdaa …. The names differ on
// different buses. The guest may name the disk differently.
func targetName(bus machine.Bus, n int) *libvirtxml.DomainDiskTarget {
	target, prefix := &libvirtxml.DomainDiskTarget{Bus: "virtio"}, "vd"
	switch bus {
	case machine.BusCDROM:
		target.Bus, prefix = "sata", "hd"
	case machine.BusSCSI:
		target.Bus, prefix = "scsi", "sd"
	}
	letters := ""
	for n++; n > 0; n = (n - 1) / 26 {
		letters = string(rune('a'+(n-1)%26)) + letters
	}
	target.Dev = prefix + letters
	return target
}
