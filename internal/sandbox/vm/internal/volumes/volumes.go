package volumes

import (
	"fmt"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/blockdev"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/cloudinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Volumes are a machine's volumes: directories for the guest to mount, block devices for its disks, and files for
// cloud-init to write.
type Volumes struct {
	// Driver shares directories with the guest.
	Driver machine.ShareDriver
	Shares []machine.Share
	Disks  []machine.Disk
	// GuestMounts are the mounts for cloud-init to set up in the guest. Devices are the disks for cloud-init to link.
	GuestMounts []cloudinit.Mount
	Devices     []cloudinit.Device
	// Mounts are the requested mounts that take effect.
	Mounts []*runtimeapi.Mount
	// Root is the path of the block device for the root disk; "" means that the root disk is an overlay on the image's
	// disk.
	Root string
}

// Of converts a container's mounts and devices to volumes.
func Of(config *runtimeapi.ContainerConfig, driver machine.ShareDriver) (v Volumes, err error) {
	v.Driver = driver
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

func (v *Volumes) mount(m *runtimeapi.Mount) error {
	kind, err := cloudinit.Classify(m.GetHostPath(), m.GetContainerPath(), v.Driver)
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
			return fmt.Errorf("a directory cannot be the root disk; give the machine a block device at / (volumeDevices): %w",
				errdefs.ErrInvalidArgument)
		}
		mount.Tag = cloudinit.ShareTag(len(v.Shares))
		v.Shares = append(v.Shares, machine.Share{Tag: mount.Tag, Path: m.GetHostPath(), Driver: v.Driver, ReadOnly: m.GetReadonly(),
			Live: m.GetPropagation() == runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER})
		v.GuestMounts = append(v.GuestMounts, mount)
	default:
		v.GuestMounts = append(v.GuestMounts, mount)
	}
	v.Mounts = append(v.Mounts, m)
	return nil
}

// device adds a block device. A device at / becomes the root disk. Any other device becomes a disk that the guest finds
// by its serial number.
func (v *Volumes) device(host, container string, readonly bool) error {
	file, err := blockdev.Open(host, readonly)
	if err != nil {
		return err
	}
	defer file.Close()
	if path.Clean(container) == "/" {
		if readonly || v.Root != "" {
			return fmt.Errorf("the root disk at / must be the only one there, and writable: %w", errdefs.ErrInvalidArgument)
		}
		v.Root = host
		return nil
	}
	disk := machine.Disk{ID: fmt.Sprintf("disk%d", len(v.Disks)), File: machine.File{Path: host}, Format: "raw", ReadOnly: readonly}
	if disk.LogicalBlock, disk.PhysicalBlock, err = blockdev.Sectors(file); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	v.Disks = append(v.Disks, disk)
	v.Devices = append(v.Devices, cloudinit.Device{Serial: disk.ID, Path: container})
	return nil
}

// Scratch adds the empty disks that the annotations ask for. The caller makes their files. If base is not "", the disks have
// the content of that raw image.
func (v *Volumes) Scratch(wanted []annotations.ScratchDisk, base string, file func(id string) string) {
	for i, w := range wanted {
		disk := machine.Disk{ID: fmt.Sprintf("scratch%d", i), Format: "qcow2"}
		disk.Path = file(disk.ID)
		if base != "" {
			disk.Base = &machine.Base{File: machine.File{Path: base}, Format: "raw"}
		}
		v.Disks = append(v.Disks, disk)
		v.Devices = append(v.Devices, cloudinit.Device{Serial: disk.ID, Path: w.Path})
	}
}
