package vm

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cdi"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/cloudinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/console"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/rootdisk"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/volumes"
	"github.com/tripod-run/tripod/internal/spans"
)

var (
	fpLeased    = failpoint.New("vm.create-container.leased")
	fpOverlay   = failpoint.New("vm.create-container.overlay")
	fpCloudInit = failpoint.New("vm.create-container.cloud-init")
	fpDefined   = failpoint.New("vm.create-container.defined")
	fpCreated   = failpoint.New("vm.create-container.created")
)

// plan holds everything that CreateContainer needs to make a machine.
type plan struct {
	pod       *sandbox.Pod
	container *sandbox.Container
	sandbox   *pod
	options   annotations.Options
	files     *disk.Files
	// cdrom means that the image's disk is a CD-ROM. The machine then has no root disk.
	cdrom bool
	// root is the root disk, if it is on a block device.
	root       rootdisk.Disk
	interfaces []tap.Interface
	volumes    volumes.Volumes
	warnings   []string
	// firmware is the node's UEFI firmware, once findUEFI has found it.
	firmware *boot.UEFI
	// uefi is the flash memory of a machine that boots by UEFI.
	uefi       *machine.UEFI
	unbootable string // see state.Unbootable
	// like is machine.Disk.Like of the cloud-init image, if the machine can continue from a template.
	like string
}

// CreateContainer implements sandbox.Backend. It checks the image and the volumes, leases the image, and makes the root
// disk, the cloud-init image and the definition.
func (b *Backend) CreateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error) {
	o, err := b.plan(ctx, p, c)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	defer o.files.Close()
	err = spans.Run(ctx, "vm.disks", func(ctx context.Context) error { return b.makeDisks(ctx, o) })
	if err != nil {
		return sandbox.Resolved{}, err
	}
	definition, err := b.definition(o)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	err = spans.Run(ctx, "vm.template", func(ctx context.Context) error { return b.chooseTemplate(ctx, p, &definition) })
	if err != nil {
		b.log.Warn("a machine boots instead of continuing from a template", "container", c.ID, "err", err)
	}
	if err := b.cfg.Driver.Define(ctx, definition); err != nil {
		return sandbox.Resolved{}, fmt.Errorf("define the machine: %w", err)
	}
	if err := fpDefined.Hit(ctx); err != nil {
		return sandbox.Resolved{}, err
	}
	for _, w := range o.warnings {
		b.log.Warn("container configuration", "container", c.ID, "warning", w)
	}
	err = b.ledger.Create(p.ID, c.ID, state{
		Record: ledger.Record{ID: c.ID, Phase: ledger.Created}, Image: c.ImageID, Layout: string(o.files.Layout), Definition: definition,
		RootID: o.root.ID, Warnings: o.warnings, WaitForAgent: o.options.WaitForAgent, Unbootable: o.unbootable,
	})
	if err != nil {
		return sandbox.Resolved{}, err
	}
	return sandbox.Resolved{Mounts: o.volumes.Mounts, StopSignal: runtimeapi.Signal_SIGNAL_SIGTERM}, fpCreated.Hit(ctx)
}

// plan checks and collects everything that is needed to make the machine, and leases its image.
func (b *Backend) plan(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (o *plan, err error) {
	o = &plan{pod: p, container: c}
	if o.sandbox, err = b.sandbox(p.ID); err != nil {
		return nil, fmt.Errorf("the sandbox is missing: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if o.options, _, err = b.options(p); err != nil {
		return nil, err
	}
	img, err := b.cfg.Images.Machine(ctx, c.ImageID)
	if err != nil {
		return nil, fmt.Errorf("the machine's image: %w", err)
	}
	driver, why, err := b.shareDriver(ctx, o)
	if err != nil {
		return nil, err
	}
	o.warnings = append(o.warnings, volumes.FlexWarnings(c.Config.GetMounts())...)
	config, err := cdi.New(b.cfg.CDIDirs).AsBlocks(c.Config)
	if err != nil {
		return nil, err
	}
	if o.volumes, err = volumes.Of(config, driver); err != nil {
		return nil, err
	}
	if why != "" && len(o.volumes.GuestMounts) > 0 {
		b.log.Warn("volumes of a machine are limited", "container", c.ID, "reason", why)
		o.warnings = append(o.warnings, why)
	}
	o.volumes.Scratch(o.options.ScratchDisks, b.cfg.ScratchBase, func(disk string) string { return b.cfg.ScratchFile(c.ID, disk) })
	if p.Netns != "" {
		if o.interfaces, err = b.cfg.Network.Read(b.cfg.tapsFile(p.ID)); err != nil {
			return nil, fmt.Errorf("the pod's taps: %w", err)
		}
	}
	if err := o.chooseMedium(img); err != nil {
		return nil, err
	}
	if size := o.options.RootVolumeSize; img.Format != "" && size > 0 && size < img.VirtualSize {
		return nil, fmt.Errorf("annotation VirtletRootVolumeSize (tripod.dev/vm.root-volume-size): %d bytes are less than the %d of the image's disk, which cannot shrink: %w",
			size, img.VirtualSize, errdefs.ErrInvalidArgument)
	}
	if len(c.Config.GetArgs()) > 0 && img.Layout != disk.LayoutKernel {
		return nil, fields.Unsupported("args", "%q: only an image with its own kernel has a command line; a disk boots the system on it",
			c.Config.GetArgs())
	}
	if o.options.Firmware == annotations.FirmwareUEFI && img.Layout == disk.LayoutKernel {
		return nil, fields.Unsupported("annotation tripod.dev/vm.firmware",
			"%q: the image has its own kernel, which QEMU starts; only a disk boots by UEFI", o.options.Firmware)
	}
	if o.files, err = b.cfg.Images.OpenDisk(ctx, c.ID, c.ImageID); err != nil {
		return nil, fmt.Errorf("the machine's image: %w", err)
	}
	if err := fpLeased.Hit(ctx); err != nil {
		o.files.Close()
		return nil, err
	}
	return o, nil
}

// shareDriver returns the driver for shared directories. The pod can choose the driver. If it does not, shareDriver
// chooses virtio-fs or, where virtio-fs does not work, 9p. In the latter case, the second result says why virtio-fs
// does not work. If the container has no mounts, shareDriver does not try virtio-fs.
func (b *Backend) shareDriver(ctx context.Context, o *plan) (driver machine.ShareDriver, why string, err error) {
	driver = o.options.ShareDriver
	switch {
	case driver.By9p():
		return driver, "", nil
	case len(o.container.Config.GetMounts()) == 0:
		return machine.Share9p, "", nil
	}
	err = b.cfg.Virtiofs(ctx)
	switch {
	case err == nil:
		return machine.ShareVirtiofs, "", nil
	case driver == machine.ShareVirtiofs:
		return "", "", fmt.Errorf("annotation %sshare-driver: virtiofs: virtio-fs does not work on this node: %w: %w", annotations.Prefix, err,
			errdefs.ErrFailedPrecondition)
	case ctx.Err() != nil:
		return "", "", err
	default:
		return machine.Share9p,
			fmt.Sprintf("directories are shared by 9p, without owners, and Secrets and ConfigMaps are copied once, because there is no virtio-fs: %v", err), nil
	}
}

// chooseMedium sets o.cdrom. It refuses settings of a root disk, which a machine with a CD-ROM does not have.
func (o *plan) chooseMedium(img *disk.MachineImage) error {
	const medium = "annotation tripod.dev/vm.image-medium"
	iso := img.ISO9660 && img.Layout != disk.LayoutKernel // a kernel finds its disks by their order
	o.cdrom = iso && o.options.ImageMedium != annotations.MediumDisk || o.options.ImageMedium == annotations.MediumCDROM
	switch {
	case !o.cdrom:
		return nil
	case img.Format != disk.FormatRaw:
		return fields.Invalid(medium, "%q: the image has no raw disk; only a raw disk can be a CD-ROM", o.options.ImageMedium)
	case o.volumes.Root != "":
		return fields.Invalid("devices",
			"%s at / would be the root disk, but the image is a CD-ROM, which is not copied; give the machine the device at another path, or set %s to disk", o.volumes.Root, medium)
	case o.options.RootVolumeSize > 0:
		return fields.Invalid("annotation tripod.dev/vm.root-volume-size (VirtletRootVolumeSize)",
			"the image is a CD-ROM, so the machine has no root disk; add a disk with scratch-disks or volumeDevices, or set %s to disk", medium)
	}
	return nil
}

// makeDisks makes the root disk, the scratch disks and the cloud-init image. It replaces the files of an earlier
// attempt.
func (b *Backend) makeDisks(ctx context.Context, o *plan) error {
	id := o.container.ID
	if err := os.RemoveAll(b.cfg.diskDir(id)); err != nil {
		return sandbox.DiskError(fmt.Errorf("clear the machine's directory: %w", err))
	}
	if err := os.MkdirAll(b.cfg.diskDir(id), 0o700); err != nil {
		return sandbox.DiskError(fmt.Errorf("make the machine's directory: %w", err))
	}
	if err := console.MakeDir(b.cfg.serialDir(id), b.cfg.VM.ConsoleBuffer); err != nil {
		return err
	}
	if err := b.checkFirmware(o); err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	if err := b.makeRoot(ctx, o); err != nil {
		return err
	}
	if err := b.chooseFirmware(ctx, o); err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	for i, disk := range o.options.ScratchDisks {
		if err := qcow2.CreateOverlay(ctx, b.cfg.ScratchFile(id, fmt.Sprintf("scratch%d", i)), disk.Size, qcow2.Overlay{}); err != nil {
			return sandbox.DiskError(fmt.Errorf("make the scratch disk for %s: %w", disk.Path, err))
		}
	}
	if err := fpOverlay.Hit(ctx); err != nil {
		return err
	}
	if b.cfg.Plug {
		return nil
	}
	input, err := b.cloudInit(o)
	if err != nil {
		return err
	}
	built, err := cloudinit.Build(input)
	if err != nil {
		return fmt.Errorf("cloud-init: %w", err)
	}
	o.warnings = append(o.warnings, built.Warnings...)
	if o.options.Template != "" {
		if err := b.forTemplate(o, input, built); err != nil {
			return err
		}
	}
	if err := built.WriteFile(b.cfg.cloudInitFile(id), 0o600); err != nil {
		return sandbox.DiskError(fmt.Errorf("write the cloud-init image: %w", err))
	}
	return fpCloudInit.Hit(ctx)
}

// makeRoot makes the root disk: an overlay on the image's disk, or a copy of that disk on the pod's block device.
func (b *Backend) makeRoot(ctx context.Context, o *plan) error {
	if o.volumes.Root == "" {
		if o.files.Disk == nil || o.cdrom {
			return nil
		}
		size := max(o.options.RootVolumeSize, o.files.VirtualSize)
		if err := qcow2.CreateOverlay(ctx, b.cfg.overlayFile(o.container.ID), size, qcow2.Overlay{}); err != nil {
			return sandbox.DiskError(fmt.Errorf("make the root disk: %w", err))
		}
		return nil
	}
	if o.files.Disk == nil {
		return fields.Invalid("devices", "%s at / would be the root disk, but the image has no disk to copy to it", o.volumes.Root)
	}
	info, err := o.files.Disk.Stat()
	if err != nil {
		return err
	}
	src := rootdisk.Source{Image: o.container.ImageID, File: o.files.Disk, FileSize: info.Size(), Format: o.files.Format,
		Size: o.files.VirtualSize}
	if o.root, err = rootdisk.Prepare(ctx, o.volumes.Root, src, o.options.RootDeviceOverwrite); err != nil {
		return sandbox.DiskError(err)
	}
	if o.root.Image != o.container.ImageID {
		o.warnings = append(o.warnings,
			fmt.Sprintf("the root disk on %s was made from image %s and is kept; annotation root-device-overwrite: image replaces it",
				o.volumes.Root, o.root.Image))
	}
	if size := o.options.RootVolumeSize; size > o.root.Size {
		o.warnings = append(o.warnings,
			fmt.Sprintf("annotation root-volume-size: the root disk has only %d bytes, the size of its device", o.root.Size))
	}
	return nil
}

// checkFirmware refuses a machine that needs UEFI and cannot have it, before the image is copied to a device.
func (b *Backend) checkFirmware(o *plan) error {
	if o.volumes.Root == "" || o.files.Kernel != nil || o.files.Disk == nil || o.options.Firmware == annotations.FirmwareBIOS {
		return nil
	}
	if o.options.Firmware == "" {
		disk, size, closeDisk, err := o.openImage()
		if err != nil {
			return err
		}
		defer closeDisk()
		if found, err := boot.Inspect(disk, size); err != nil || !found.UEFIOnly() {
			return err
		}
	}
	return b.findUEFI(o)
}

// chooseFirmware makes the flash memory of a machine whose root disk or CD-ROM boots by UEFI. For a machine with a BIOS,
// it sets o.unbootable if the BIOS cannot boot the root disk.
func (b *Backend) chooseFirmware(ctx context.Context, o *plan) error {
	if o.files.Kernel != nil {
		return nil // QEMU loads the kernel
	}
	uefiOnly, unbootable, err := o.inspectBoot()
	if err != nil {
		return err
	}
	if o.options.Firmware == annotations.FirmwareUEFI || o.options.Firmware == "" && uefiOnly {
		return b.makeFlash(ctx, o)
	}
	o.unbootable = unbootable
	return nil
}

// inspectBoot reports whether the root disk or CD-ROM boots by UEFI only, and why a BIOS that tries to boot the root disk
// would fail without a message.
func (o *plan) inspectBoot() (uefiOnly bool, unbootable string, err error) {
	if o.cdrom {
		uefiOnly, err = boot.UEFIOnlyCD(o.files.Disk)
		return uefiOnly, "", err
	}
	disk, size, closeDisk, err := o.openRoot()
	if err != nil {
		return false, "", err
	}
	defer closeDisk()
	found, err := boot.Inspect(disk, size)
	return found.UEFIOnly(), found.Unbootable(), err
}

// makeFlash sets o.uefi. The machine's own copy of the firmware's variables is on the block device of its root disk, or
// in a file of the container.
func (b *Backend) makeFlash(ctx context.Context, o *plan) error {
	if err := b.findUEFI(o); err != nil {
		return err
	}
	vars, err := os.ReadFile(o.firmware.Vars)
	if err != nil {
		return fmt.Errorf("read the template of the UEFI variables: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	o.uefi = &machine.UEFI{Code: machine.File{Path: o.firmware.Code}}
	if o.volumes.Root != "" {
		kept, err := b.keepVars(ctx, o, vars)
		if kept || err != nil {
			return err
		}
	}
	o.uefi.Vars.Path = b.cfg.nvramFile(o.container.ID)
	if err := os.WriteFile(o.uefi.Vars.Path, vars, 0o600); err != nil {
		return sandbox.DiskError(fmt.Errorf("write the UEFI variables: %w", err))
	}
	return nil
}

// keepVars sets o.uefi.Vars to the variables on the block device of the root disk, and returns true. It returns false,
// and adds a warning, if they cannot be there.
func (b *Backend) keepVars(ctx context.Context, o *plan, template []byte) (bool, error) {
	const gone = "the UEFI variables of the root disk on %s are removed with the container: "
	switch {
	case b.cfg.Driver.Name() == DriverLibvirt:
		o.warnings = append(o.warnings, fmt.Sprintf(gone+"the driver libvirt cannot keep them on the device", o.volumes.Root))
		return false, nil
	case !rootdisk.VarsFit(len(template)):
		o.warnings = append(o.warnings,
			fmt.Sprintf(gone+"the %d bytes of %s do not fit on the device", o.volumes.Root, len(template), o.firmware.Vars))
		return false, nil
	}
	replaced, err := rootdisk.KeepVars(ctx, o.volumes.Root, o.root.ID, template)
	if err != nil {
		return false, sandbox.DiskError(err)
	}
	if replaced > 0 {
		o.warnings = append(o.warnings,
			fmt.Sprintf("the UEFI variables of the root disk on %s were damaged or those of another firmware, and are replaced by %s",
				o.volumes.Root, o.firmware.Vars))
	}
	o.uefi.Vars = machine.FilePart{File: machine.File{Path: o.volumes.Root}, Offset: rootdisk.VarsOffset, Size: uint64(len(template))}
	return true, nil
}

// findUEFI sets o.firmware, if the machine has enough memory for it.
func (b *Backend) findUEFI(o *plan) error {
	if o.firmware != nil {
		return nil
	}
	if err := checkUEFIMemory(b.memory(sandbox.Resources(o.pod, o.container))); err != nil {
		return err
	}
	found, err := b.cfg.UEFI()
	if err != nil {
		return fmt.Errorf("the machine boots by UEFI: %w", err)
	}
	o.firmware = &found
	return nil
}

// openRoot opens the root disk for reading. Reads return the content that the guest will see.
func (o *plan) openRoot() (disk io.ReaderAt, size uint64, closeDisk func(), err error) {
	if o.volumes.Root != "" {
		device, err := os.Open(o.volumes.Root)
		if err != nil {
			return nil, 0, nil, err
		}
		return io.NewSectionReader(device, int64(o.root.Offset), int64(o.root.Size)), o.root.Size, func() { device.Close() }, nil
	}
	return o.openImage()
}

// openImage opens the image's disk like openRoot.
func (o *plan) openImage() (content io.ReaderAt, size uint64, closeDisk func(), err error) {
	size = max(o.options.RootVolumeSize, o.files.VirtualSize)
	if o.files.Format != disk.FormatQcow2 {
		return o.files.Disk, size, func() {}, nil
	}
	info, err := o.files.Disk.Stat()
	if err != nil {
		return nil, 0, nil, err
	}
	q, err := qcow2.NewReader(o.files.Disk, info.Size())
	if err != nil {
		return nil, 0, nil, err
	}
	return q, size, q.Close, nil
}

// cloudInit returns the input of the cloud-init image, which the guest reads at its first boot.
func (b *Backend) cloudInit(o *plan) (cloudinit.Input, error) {
	dns, _, err := o.pod.DNS()
	if err != nil {
		return cloudinit.Input{}, err
	}
	in := cloudinit.Input{
		Options: o.options, PodUID: cmp.Or(o.pod.Config.GetMetadata().GetUid(), o.pod.ID), Hostname: hostname(o.pod),
		Mounts: o.volumes.GuestMounts, ShareDriver: o.volumes.Driver, Devices: o.volumes.Devices,
		DNS:   cloudinit.DNS{Servers: dns.GetServers(), Search: dns.GetSearches()},
		Agent: b.cfg.AgentDisk != "",
	}
	for _, e := range o.container.Config.GetEnvs() {
		in.Env = append(in.Env, cloudinit.EnvVar{Name: e.GetKey(), Value: string(e.GetValue())})
	}
	for _, n := range o.interfaces {
		nic := cloudinit.Interface{Name: n.Link, MAC: n.MAC, MTU: n.MTU, Addrs: n.Addrs}
		for _, r := range n.Routes {
			nic.Routes = append(nic.Routes, cloudinit.Route{Dst: r.Dst, Via: r.GW, Metric: r.Metric})
		}
		in.Interfaces = append(in.Interfaces, nic)
	}
	return in, nil
}
