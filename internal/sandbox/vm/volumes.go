package vm

import (
	"context"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/cloudinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// volumes are what a machine gets of the node: directories that the guest mounts, block devices that become its disks, files that
// cloud-init writes.
type volumes struct {
	// driver is how directories are shared with the guest.
	driver machine.ShareDriver
	shares []machine.Share
	disks  []machine.Disk
	// guestMounts and devices are what cloud-init mounts in the guest.
	guestMounts []cloudinit.Mount
	devices     []cloudinit.Device
	// mounts are those of the request that take effect.
	mounts []*runtimeapi.Mount
	// root is the block device to become the root disk; "" for an overlay on the image's disk.
	root string
}

// shareDriver returns how directories are shared: as the pod asks, or by virtio-fs if that works, or by 9p with the reason why.
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
		return "", "", fmt.Errorf("annotation %sshare-driver: virtiofs: directories cannot be shared by virtio-fs here: %w: %w", annotations.Prefix, err, errdefs.ErrFailedPrecondition)
	case ctx.Err() != nil:
		return "", "", err
	default:
		return machine.Share9p, fmt.Sprintf("directories are shared by 9p, without owners, and Secrets and ConfigMaps are copied once: no virtio-fs: %v", err), nil
	}
}

// volumesOf sorts a container's mounts and devices by kind.
func volumesOf(config *runtimeapi.ContainerConfig, driver machine.ShareDriver) (v volumes, err error) {
	v.driver = driver
	for i, m := range config.GetMounts() {
		if path.Clean(m.GetContainerPath()) == sandbox.TerminationMessagePath(config) {
			continue // the kubelet's; the status reports how a machine ended
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
			return fmt.Errorf("at / is the root disk, and a directory is none; give the machine a block device there (volumeDevices): %w", errdefs.ErrInvalidArgument)
		}
		mount.Tag = cloudinit.ShareTag(len(v.shares))
		v.shares = append(v.shares, machine.Share{Tag: mount.Tag, Path: m.GetHostPath(), Driver: v.driver, ReadOnly: m.GetReadonly()})
		v.guestMounts = append(v.guestMounts, mount)
	default:
		v.guestMounts = append(v.guestMounts, mount)
	}
	v.mounts = append(v.mounts, m)
	return nil
}

// device gives the guest a block device as a disk, which the guest finds by its serial number.
func (v *volumes) device(host, container string, readonly bool) error {
	info, err := os.Stat(host)
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if info.Mode()&os.ModeDevice == 0 || info.Mode()&os.ModeCharDevice != 0 {
		return fmt.Errorf("is not a block device, and a machine can be given no other: %w", errdefs.ErrNotImplemented)
	}
	if !readonly && unix.Access(host, unix.W_OK) != nil {
		return fmt.Errorf("cannot be written to, and is not asked for read-only: %w", errdefs.ErrInvalidArgument)
	}
	if path.Clean(container) == "/" {
		if readonly || v.root != "" {
			return fmt.Errorf("at / is the root disk, which is one, and is written to: %w", errdefs.ErrInvalidArgument)
		}
		v.root = host
		return nil
	}
	disk := machine.Disk{ID: fmt.Sprintf("disk%d", len(v.disks)), File: machine.File{Path: host}, Format: "raw", ReadOnly: readonly}
	v.disks = append(v.disks, disk)
	v.devices = append(v.devices, cloudinit.Device{Serial: disk.ID, Path: container})
	return nil
}

// scratch adds the empty disks that the annotations ask for. Their files are made later.
func (v *volumes) scratch(wanted []annotations.ScratchDisk, file func(id string) string) {
	for i, w := range wanted {
		disk := machine.Disk{ID: fmt.Sprintf("scratch%d", i), Format: "qcow2"}
		disk.Path = file(disk.ID)
		v.disks = append(v.disks, disk)
		v.devices = append(v.devices, cloudinit.Device{Serial: disk.ID, Path: w.Path})
	}
}
