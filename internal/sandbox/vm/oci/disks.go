package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/blockdev"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// plugged maps what a pod's machine has as disks to their LUNs: images by their IDs, and block devices by diskOf.
type plugged map[string]int

// lun returns the LUN of a disk, which it reserves if the disk is new. The caller holds the lock of the pod's disks.
func (o *Backend) lun(pod, disk string) (int, error) {
	disks := plugged{}
	if raw, err := os.ReadFile(o.disksFile(pod)); err == nil {
		if err := json.Unmarshal(raw, &disks); err != nil {
			return 0, fmt.Errorf("the pod's disks: %w", err)
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	if lun, known := disks[disk]; known {
		return lun, nil
	}
	lun := len(disks)
	if lun > maxLUN {
		return 0, fmt.Errorf("the pod's machine has %d disks, the maximum: %w", lun, errdefs.ErrResourceExhausted)
	}
	disks[disk] = lun
	raw, err := json.Marshal(disks)
	if err != nil {
		return 0, err
	}
	return lun, sandbox.DiskError(atomicfile.Replace(o.disksFile(pod), raw, 0o600))
}

// maxLUN is the highest LUN of a disk that QEMU's SCSI controller can have.
const maxLUN = 16383

// plugImage gives the machine the disk of an image, unless it has it, and returns the image for the guest.
func (o *Backend) plugImage(ctx context.Context, pod *podMachine, ref string) (guestapi.Image, error) {
	img, err := o.images.Get(ctx, ref)
	if err != nil {
		return guestapi.Image{}, fmt.Errorf("image %s: %w", ref, err)
	}
	pod.disks.Lock()
	defer pod.disks.Unlock()
	id := pod.pod.ID
	lun, err := o.lun(id, img.ID)
	if err != nil {
		return guestapi.Image{}, err
	}
	file, err := o.images.OpenRootDisk(ctx, leaseOf(id, lun), img.ID)
	if err != nil {
		return guestapi.Image{}, fmt.Errorf("the disk of image %s: %w", ref, err)
	}
	defer file.Close()
	if err := o.machines.Driver().Plug(ctx, id, machine.PlugDisk{LUN: lun, File: file, ReadOnly: true}); err != nil {
		return guestapi.Image{}, fmt.Errorf("the disk of image %s: %w", ref, err)
	}
	return guestapi.Image{Image: img, LUN: lun}, nil
}

// guestDevices are the devices that stand for no hardware. A container that asks for one gets the guest's.
var guestDevices = []string{
	"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/kmsg", "/dev/fuse", "/dev/net/tun",
}

// plugDevices gives the machine a container's block devices and returns them for the guest. Other devices of the node are
// refused, except for those that each kernel has.
func (o *Backend) plugDevices(ctx context.Context, pod *podMachine, devices []*runtimeapi.Device) (disks []guestapi.Device, err error) {
	for i, d := range devices {
		if d.HostPath = path.Clean(d.GetHostPath()); slices.Contains(guestDevices, d.HostPath) {
			continue
		}
		lun, err := o.plugDevice(ctx, pod, d)
		if err != nil {
			return nil, fmt.Errorf("devices[%d].host_path: %s: %w", i, d.GetHostPath(), err)
		}
		disks = append(disks, guestapi.Device{Index: i, LUN: lun})
	}
	return disks, nil
}

// plugDevice gives the machine a block device, unless it has it. The guest cannot write to a device that no container of the
// pod may write to.
func (o *Backend) plugDevice(ctx context.Context, pod *podMachine, d *runtimeapi.Device) (int, error) {
	readOnly := !strings.Contains(d.GetPermissions(), "w")
	file, err := blockdev.Open(d.GetHostPath(), readOnly)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	disk := machine.PlugDisk{File: file, ReadOnly: readOnly}
	if disk.LogicalBlock, disk.PhysicalBlock, err = blockdev.Sectors(file); err != nil {
		return 0, fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	name, err := diskOf(file, readOnly)
	if err != nil {
		return 0, err
	}
	pod.disks.Lock()
	defer pod.disks.Unlock()
	if disk.LUN, err = o.lun(pod.pod.ID, name); err != nil {
		return 0, err
	}
	return disk.LUN, o.machines.Driver().Plug(ctx, pod.pod.ID, disk)
}

// diskOf names the disk of a block device. One that is read-only is another one than one that can be written.
func diskOf(device *os.File, readOnly bool) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(device.Fd()), &st); err != nil {
		return "", &os.PathError{Op: "stat", Path: device.Name(), Err: err}
	}
	return fmt.Sprintf("block-%d:%d-%t", unix.Major(st.Rdev), unix.Minor(st.Rdev), readOnly), nil
}

// leaseOf returns the key of the lease of the image with the given LUN.
func leaseOf(pod string, lun int) string { return fmt.Sprintf("%s%s-%d", prefix, pod, lun) }

// podOfLease returns the pod of a lease's key.
func podOfLease(key string) (string, bool) {
	rest, ours := strings.CutPrefix(key, prefix)
	pod, _, cut := strings.Cut(rest, "-")
	return pod, ours && cut
}

// closeDisks releases the images of a pod whose machine has ended.
func (o *Backend) closeDisks(ctx context.Context, pod string) error {
	keys, err := o.images.Disks(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, key := range keys {
		if of, ok := podOfLease(key); ok && of == pod {
			errs = append(errs, o.images.CloseDisk(ctx, key))
		}
	}
	if err := os.Remove(o.disksFile(pod)); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
