package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/cloudinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// volumes are a machine's volumes: directories for the guest to mount, block devices for its disks, and files for
// cloud-init to write.
type volumes struct {
	// driver shares directories with the guest.
	driver machine.ShareDriver
	shares []machine.Share
	disks  []machine.Disk
	// guestMounts are the mounts for cloud-init to set up in the guest. devices are the disks for cloud-init to link.
	guestMounts []cloudinit.Mount
	devices     []cloudinit.Device
	// mounts are the requested mounts that take effect.
	mounts []*runtimeapi.Mount
	// root is the path of the block device for the root disk; "" means that the root disk is an overlay on the image's
	// disk.
	root string
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
		return "", "", fmt.Errorf("annotation %sshare-driver: virtiofs: virtio-fs does not work on this node: %w: %w", annotations.Prefix, err, errdefs.ErrFailedPrecondition)
	case ctx.Err() != nil:
		return "", "", err
	default:
		return machine.Share9p, fmt.Sprintf("directories are shared by 9p, without owners, and Secrets and ConfigMaps are copied once, because there is no virtio-fs: %v", err), nil
	}
}

// volumesOf converts a container's mounts and devices to volumes.
func volumesOf(config *runtimeapi.ContainerConfig, driver machine.ShareDriver) (v volumes, err error) {
	v.driver = driver
	for i, m := range config.GetMounts() {
		if path.Clean(m.GetContainerPath()) == sandbox.TerminationMessagePath(config) {
			continue // made by the kubelet; the status reports how a machine ended
		}
		if err := v.mount(m); err != nil {
			return v, fmt.Errorf("mounts[%d].host_path: %s: %w", i, m.GetHostPath(), err)
		}
	}
	for i, d := range config.GetDevices() {
		if err := v.device(d.GetHostPath(), d.GetContainerPath(), !strings.Contains(d.GetPermissions(), "w")); err != nil {
			return v, fmt.Errorf("devices[%d].host_path: %s: %w", i, d.GetHostPath(), err)
		}
	}
	return v, nil
}

func (v *volumes) mount(m *runtimeapi.Mount) error {
	kind, err := cloudinit.Classify(m.GetHostPath(), m.GetContainerPath(), v.driver)
	if err != nil {
		return err
	}
	mount := cloudinit.Mount{HostPath: m.GetHostPath(), ContainerPath: m.GetContainerPath(), ReadOnly: m.GetReadonly()}
	switch kind {
	case cloudinit.KindDevice:
		if err := v.device(m.GetHostPath(), m.GetContainerPath(), m.GetReadonly()); err != nil {
			return err
		}
	case cloudinit.KindShare:
		if path.Clean(m.GetContainerPath()) == "/" {
			return fmt.Errorf("a directory cannot be the root disk; give the machine a block device at / (volumeDevices): %w", errdefs.ErrInvalidArgument)
		}
		mount.Tag = cloudinit.ShareTag(len(v.shares))
		v.shares = append(v.shares, machine.Share{Tag: mount.Tag, Path: m.GetHostPath(), Driver: v.driver, ReadOnly: m.GetReadonly(),
			Live: m.GetPropagation() == runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER})
		v.guestMounts = append(v.guestMounts, mount)
	default:
		v.guestMounts = append(v.guestMounts, mount)
	}
	v.mounts = append(v.mounts, m)
	return nil
}

// device adds a block device. A device at / becomes the root disk. Any other device becomes a disk that the guest finds
// by its serial number.
func (v *volumes) device(host, container string, readonly bool) error {
	file, err := openBlockDevice(host, readonly)
	if err != nil {
		return err
	}
	defer file.Close()
	if path.Clean(container) == "/" {
		if readonly || v.root != "" {
			return fmt.Errorf("the root disk at / must be the only one there, and writable: %w", errdefs.ErrInvalidArgument)
		}
		v.root = host
		return nil
	}
	disk := machine.Disk{ID: fmt.Sprintf("disk%d", len(v.disks)), File: machine.File{Path: host}, Format: "raw", ReadOnly: readonly}
	if disk.LogicalBlock, disk.PhysicalBlock, err = sectors(file); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	v.disks = append(v.disks, disk)
	v.devices = append(v.devices, cloudinit.Device{Serial: disk.ID, Path: container})
	return nil
}

// openBlockDevice opens a block device of the node for a guest.
func openBlockDevice(path string, readOnly bool) (*os.File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if info.Mode()&os.ModeDevice == 0 || info.Mode()&os.ModeCharDevice != 0 {
		return nil, fmt.Errorf("is not a block device, the only kind of device that a machine can have: %w", errdefs.ErrNotImplemented)
	}
	flags := os.O_RDWR
	if readOnly {
		flags = os.O_RDONLY
	}
	file, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
	if !readOnly && (errors.Is(err, os.ErrPermission) || errors.Is(err, unix.EROFS)) {
		return nil, fmt.Errorf("is not writable, but was not requested read-only: %w", errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return file, nil
}

// sectors returns the sizes in bytes of a block device's logical and physical sectors. A guest that saw others would not
// find the partitions and file systems that the node made, and the other way round.
func sectors(device *os.File) (logical, physical int, err error) {
	if logical, err = unix.IoctlGetInt(int(device.Fd()), unix.BLKSSZGET); err != nil {
		return 0, 0, fmt.Errorf("the sector size of %s: %w", device.Name(), err)
	}
	if physical, err = unix.IoctlGetInt(int(device.Fd()), unix.BLKPBSZGET); err != nil {
		return 0, 0, fmt.Errorf("the sector size of %s: %w", device.Name(), err)
	}
	return logical, physicalBlock(logical, physical), nil
}

// physicalBlock returns the size of physical sectors for QEMU, which takes only powers of two up to 2 MiB that are not
// less than the logical size. The size is a hint for the guest, and some devices report one that is none of these.
func physicalBlock(logical, physical int) int {
	const most = 2 << 20
	if physical < logical || physical > most || physical&(physical-1) != 0 {
		return logical
	}
	return physical
}

// scratch adds the empty disks that the annotations ask for. makeDisks makes their files. If base is not "", the disks have
// the content of that raw image.
func (v *volumes) scratch(wanted []annotations.ScratchDisk, base string, file func(id string) string) {
	for i, w := range wanted {
		empty := machine.Disk{ID: fmt.Sprintf("scratch%d", i), Format: "qcow2"}
		empty.Path = file(empty.ID)
		if base != "" {
			empty.Base = &machine.Base{File: machine.File{Path: base}, Format: disk.FormatRaw}
		}
		v.disks = append(v.disks, empty)
		v.devices = append(v.devices, cloudinit.Device{Serial: empty.ID, Path: w.Path})
	}
}
