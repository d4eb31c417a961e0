package qemu

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// maxCPUs is the highest number of CPUs that QEMU 7.2's q35 machine supports.
const maxCPUs = 255

var (
	nameForm  = lazyregexp.New(`^[0-9a-f]{64}$`)
	uuidForm  = lazyregexp.New(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
	modelForm = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._+=,-]*$`)
	// diskForm limits an ID to 20 characters, because the ID becomes the disk's serial number, which has at most 20.
	// The name of a QEMU node can have 31 characters, so a node's name has room for a suffix after the ID.
	diskForm = lazyregexp.New(`^[a-zA-Z][a-zA-Z0-9_-]{0,19}$`)
	tagForm  = lazyregexp.New(`^[A-Za-z0-9_.:-]{1,31}$`)
)

// Validate returns errdefs.ErrInvalidArgument for a definition that QEMU does not support or could misunderstand. The
// definition's values become parts of QEMU's options, where a comma is a separator.
func Validate(d machine.Definition) error {
	refuse := func(format string, a ...any) error {
		return fmt.Errorf("machine %.64s: %s: %w", d.Name, fmt.Sprintf(format, a...), errdefs.ErrInvalidArgument)
	}
	switch {
	case !nameForm().MatchString(d.Name):
		return refuse("name %q is not 64 lower-case hex digits", d.Name)
	case !uuidForm().MatchString(d.UUID):
		return refuse("%q is not a UUID", d.UUID)
	case d.CPUs < 1 || d.CPUs > maxCPUs:
		return refuse("%d CPUs is not between 1 and %d", d.CPUs, maxCPUs)
	case d.Memory < 1<<20:
		return refuse("memory of %d bytes is less than 1 MiB", d.Memory)
	case d.Growth != nil && !canGrow(d):
		return refuse("growth needs plug, and more memory and CPUs than the machine boots with: got %+v", *d.Growth)
	case d.CPUModel != "" && !modelForm().MatchString(d.CPUModel):
		return refuse("%q is not a CPU model", d.CPUModel)
	case d.LibvirtCPU != "":
		return refuse("only the driver libvirt takes a <cpu> element; set vm.driver to libvirt, or remove the element")
	case d.Kernel == nil && (d.Initrd != nil || d.Cmdline != ""):
		return refuse("an initrd or a command line needs a kernel")
	case d.Kernel != nil && d.UEFI != nil:
		return refuse("QEMU starts the kernel, so there is nothing to boot by UEFI")
	case d.Kernel == nil && len(d.Disks) == 0:
		return refuse("the machine has neither a disk nor a kernel to boot from")
	case d.Plug && d.Hotplug:
		return refuse("plug and hotplug exclude each other: each has a controller for further disks")
	case d.UID <= 0 || d.GID <= 0:
		return refuse("QEMU must not run as user %d, group %d", d.UID, d.GID)
	case d.Cgroup != "" && (!filepath.IsAbs(d.Cgroup) || filepath.Clean(d.Cgroup) != d.Cgroup):
		return refuse("cgroup %q is not absolute and clean", d.Cgroup)
	}
	if d.UEFI != nil {
		if vars := d.UEFI.Vars; !besideRoot(vars, d.Disks) {
			return refuse("the UEFI variables, %d bytes at %d of %s, are neither a whole file nor whole sectors beside the root disk", vars.Size,
				vars.Offset, vars.Path)
		}
	}
	if d.Saved != "" {
		if err := validateSaved(d, refuse); err != nil {
			return err
		}
	}
	for what, path := range map[string]string{"dir": d.Dir, "stateDir": d.StateDir, "serialLog": d.SerialLog} {
		if !filepath.IsAbs(path) {
			return refuse("%s %q is not absolute", what, path)
		}
	}
	return validateDevices(d, refuse)
}

// canGrow reports whether a machine's growth is that of a machine that QEMU can make.
func canGrow(d machine.Definition) bool {
	g := d.Growth
	return d.Plug && g.Boot >= 1<<20 && g.Boot <= d.Memory && d.Memory <= g.Memory && growthRegion(d) > 0 && d.CPUs <= g.CPUs &&
		g.CPUs <= maxCPUs
}

// besideRoot reports whether the UEFI variables are a whole file, or whole sectors of the root disk's device in front of
// the root disk, where QEMU does not lock them.
func besideRoot(vars machine.FilePart, disks []machine.Disk) bool {
	if vars.Size == 0 {
		return vars.Offset == 0
	}
	return len(disks) > 0 && disks[0].Path == vars.Path && !disks[0].ReadOnly && vars.Offset%512 == 0 && vars.Size%512 == 0 &&
		vars.Offset < disks[0].Offset && vars.Size <= disks[0].Offset-vars.Offset
}

// validateSaved checks a machine that continues from a saved state. It has one port for its other devices, with eight
// functions.
func validateSaved(d machine.Definition, refuse func(string, ...any) error) error {
	switch {
	case !filepath.IsAbs(d.Saved):
		return refuse("saved %q is not absolute", d.Saved)
	case !d.Plug:
		return refuse("a machine without a controller for further disks cannot continue from a saved state")
	}
	if err := machine.CheckSaved(d); err != nil {
		return refuse("a machine cannot continue from a saved state: %v", err)
	}
	return nil
}

func validateDevices(d machine.Definition, refuse func(string, ...any) error) error {
	seen := map[string]bool{}
	for i, disk := range d.Disks {
		switch {
		case !diskForm().MatchString(disk.ID) || seen[disk.ID] || strings.HasSuffix(disk.ID, "-base") || strings.HasSuffix(disk.ID, "-file"):
			return refuse("disk ID %q is not unique, is not 1 to 20 letters, digits, - and _, or ends in -base or -file", disk.ID)
		case disk.Format != "qcow2" && disk.Format != "raw":
			return refuse("disk %s: format %q is neither qcow2 nor raw", disk.ID, disk.Format)
		case disk.Bus != machine.BusVirtio && disk.Bus != machine.BusSCSI && disk.Bus != machine.BusCDROM:
			return refuse("disk %s: bus %q is not virtio, scsi or cdrom", disk.ID, disk.Bus)
		case disk.Bus == machine.BusCDROM && (i > 0 || disk.Format != "raw" || !disk.ReadOnly):
			return refuse("disk %s: a CD-ROM must be the first disk, raw and read-only", disk.ID)
		case (disk.Offset != 0 || disk.Size != 0) && (disk.Format != "raw" || disk.Size == 0 || disk.Offset%512 != 0 || disk.Size%512 != 0):
			return refuse("disk %s: offset and size need format raw and whole sectors, not %d bytes at %d in format %s", disk.ID, disk.Size,
				disk.Offset, disk.Format)
		case disk.Base != nil && disk.Format != "qcow2":
			return refuse("disk %s: only a qcow2 image can have a base", disk.ID)
		case disk.Base != nil && disk.Base.Format != "qcow2" && disk.Base.Format != "raw":
			return refuse("disk %s: format %q of the base is neither qcow2 nor raw", disk.ID, disk.Base.Format)
		}
		seen[disk.ID] = true
	}
	for _, nic := range d.NICs {
		if mac, err := nic.HardwareAddr(); err != nil || len(mac) != 6 {
			return refuse("%q is not a MAC address", nic.MAC)
		}
		if nic.MTU != 0 && (nic.MTU < 68 || nic.MTU > 65535) {
			return refuse("MTU %d is not between 68 and 65535", nic.MTU)
		}
	}
	if len(d.Shares) > maxShares {
		return refuse("%d shares are more than the %d that a machine can have", len(d.Shares), maxShares)
	}
	tags := map[string]bool{}
	for _, share := range d.Shares {
		if !tagForm().MatchString(share.Tag) || tags[share.Tag] {
			return refuse("share tag %q is not unique, or is not 1 to 31 letters, digits, -, _, : and .", share.Tag)
		}
		if share.Driver != machine.ShareVirtiofs && !share.Driver.By9p() {
			return refuse("share %s: driver %q is not virtiofs, 9p or 9p-mapped", share.Tag, share.Driver)
		}
		tags[share.Tag] = true
	}
	return nil
}
