package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var (
	fpDiskAttaching = failpoint.New("vm.disk.attaching")
	fpDiskPlugged   = failpoint.New("vm.disk.plugged")
	fpDiskDetaching = failpoint.New("vm.disk.detaching")
	fpDiskUnplugged = failpoint.New("vm.disk.unplugged")
)

// maxHotplugged is how many disks a running machine can get.
const maxHotplugged = 64

// hotplugSlots is how many disks and NICs a machine that can get further disks has at most. The port for them takes one of
// about 20 free PCI slots, which a machine with more devices may need.
const hotplugSlots = 14

// diskName is what a guest can have as the serial number of a SCSI disk.
var diskName = lazyregexp.New(`^[a-zA-Z0-9][a-zA-Z0-9_-]{0,19}$`)

// diskPhase is the phase of a hotplugged disk. Those other than diskAttached are written before the driver is called, so
// they remain if the call is interrupted. A repeated call completes it.
//
//	(none) ── AttachDisk ──▶ attaching ──▶ attached
//	   ▲                         │            │
//	   └──────── detaching ◀─────┴────────────┘ DetachDisk, or Plug has failed
type diskPhase string

const (
	diskAttaching diskPhase = "attaching"
	diskAttached  diskPhase = "attached"
	diskDetaching diskPhase = "detaching"
)

// hotplugged is a disk that a running machine got by AttachDisk. The disk is gone when the machine ends.
type hotplugged struct {
	Name     string    `json:"name"`
	Path     string    `json:"path"`
	ReadOnly bool      `json:"readOnly,omitempty"`
	Phase    diskPhase `json:"phase"`
	LUN      int       `json:"lun"`
	// Device is the block device's number.
	Device uint64 `json:"device"`
}

// AttachDisk implements sandbox.DiskAttacher.
func (b *Backend) AttachDisk(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, d sandbox.Disk) error {
	h, l, err := b.hotpluggable(p, c)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	had, known := s.hotplugged(d.Name)
	switch {
	case !known:
	case had.Phase == diskAttached && had.Path == d.Path && had.ReadOnly == d.ReadOnly:
		return nil
	case had.Phase == diskAttached:
		return fmt.Errorf("the machine has a disk %s, which is %s: %w", d.Name, had.Path, errdefs.ErrAlreadyExists)
	default: // interrupted
		if err := b.unplug(ctx, h, l, had); err != nil {
			return err
		}
	}
	return b.plug(ctx, h, l, d)
}

// DetachDisk implements sandbox.DiskAttacher.
func (b *Backend) DetachDisk(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, name string) error {
	h, l, err := b.hotpluggable(p, c)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	disk, known := s.hotplugged(name)
	if !known {
		return fmt.Errorf("no disk %q was attached to the machine while it runs: %w", name, errdefs.ErrNotFound)
	}
	return b.unplug(ctx, h, l, disk)
}

// hotpluggable returns the run of a machine that can get further disks.
func (b *Backend) hotpluggable(p *sandbox.Pod, c *sandbox.Container) (*handle, *life, error) {
	if b.cfg.Driver.Name() == driverLibvirt {
		return nil, nil, fmt.Errorf("this node's driver libvirt cannot attach disks to running machines; set vm.driver = \"qmp\": %w", errdefs.ErrNotImplemented)
	}
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return nil, nil, err
	}
	if s, _ := h.Snapshot(); !s.Definition.Hotplug && !s.Definition.Plug {
		return nil, nil, fmt.Errorf("the machine has no port for further disks, because an earlier release made it, or because it has more than %d disks and NICs: %w", hotplugSlots, errdefs.ErrFailedPrecondition)
	}
	return h, l, nil
}

// plug gives the machine a new disk. If it fails, the machine does not have the disk.
func (b *Backend) plug(ctx context.Context, h *handle, l *life, d sandbox.Disk) error {
	s, _ := h.Snapshot()
	if err := s.checkDiskName(d.Name); err != nil {
		return err
	}
	file, err := openUnusedDevice(d.Path, d.ReadOnly)
	if err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	defer file.Close()
	wanted := machine.PlugDisk{LUN: s.freeLUN(), Serial: d.Name, File: file, ReadOnly: d.ReadOnly}
	if wanted.LogicalBlock, wanted.PhysicalBlock, err = sectors(file); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	number, err := deviceNumber(file.Stat())
	if err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	if err := s.checkDevice(number); err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	disk := hotplugged{Name: d.Name, Path: d.Path, ReadOnly: d.ReadOnly, Phase: diskAttaching, LUN: wanted.LUN, Device: number}
	if err := setDisk(h, l, disk); err != nil {
		return err
	}
	if err := fpDiskAttaching.Hit(ctx); err != nil {
		return err
	}
	if err := b.cfg.Driver.Plug(ctx, h.ID, wanted); err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		return errors.Join(err, b.unplug(undo, h, l, disk))
	}
	if err := fpDiskPlugged.Hit(ctx); err != nil {
		return err
	}
	disk.Phase = diskAttached
	return setDisk(h, l, disk)
}

// unplug takes a disk away from the machine, whatever its phase is.
func (b *Backend) unplug(ctx context.Context, h *handle, l *life, disk hotplugged) error {
	disk.Phase = diskDetaching
	if err := setDisk(h, l, disk); err != nil {
		return err
	}
	if err := fpDiskDetaching.Hit(ctx); err != nil {
		return err
	}
	if err := b.cfg.Driver.Unplug(ctx, h.ID, disk.LUN); err != nil {
		return err
	}
	if err := fpDiskUnplugged.Hit(ctx); err != nil {
		return err
	}
	return changeDisks(h, l, func(others []hotplugged) []hotplugged { return without(others, disk.Name) })
}

// setDisk records a disk, in place of the one with its name.
func setDisk(h *handle, l *life, disk hotplugged) error {
	return changeDisks(h, l, func(others []hotplugged) []hotplugged { return append(without(others, disk.Name), disk) })
}

// changeDisks records the disks of a run. It returns errdefs.ErrFailedPrecondition if the run has ended.
func changeDisks(h *handle, l *life, change func([]hotplugged) []hotplugged) error {
	current, err := h.Update(l, func(s *state) { s.Hotplugged = change(s.Hotplugged) })
	if err == nil && !current {
		err = fmt.Errorf("the machine has ended: %w", errdefs.ErrFailedPrecondition)
	}
	return err
}

// without returns a copy of the disks that lacks the named one.
func without(disks []hotplugged, name string) []hotplugged {
	return slices.DeleteFunc(slices.Clone(disks), func(d hotplugged) bool { return d.Name == name })
}

func (s *state) hotplugged(name string) (hotplugged, bool) {
	i := slices.IndexFunc(s.Hotplugged, func(d hotplugged) bool { return d.Name == name })
	if i < 0 {
		return hotplugged{}, false
	}
	return s.Hotplugged[i], true
}

// checkDiskName refuses the name of a new disk if no disk can have it, or another disk has it.
func (s *state) checkDiskName(name string) error {
	switch {
	case !diskName().MatchString(name):
		return fmt.Errorf("the name %q of a disk is not 1 to 20 letters, digits, - and _, beginning with a letter or a digit: %w", name, errdefs.ErrInvalidArgument)
	case slices.ContainsFunc(s.Definition.Disks, func(d machine.Disk) bool { return d.ID == name }):
		return fmt.Errorf("the machine was made with a disk %s: %w", name, errdefs.ErrAlreadyExists)
	case len(s.Hotplugged) >= maxHotplugged:
		return fmt.Errorf("%d disks are attached to the machine, the maximum: %w", len(s.Hotplugged), errdefs.ErrResourceExhausted)
	}
	return nil
}

// checkDevice returns errdefs.ErrFailedPrecondition if the block device with this number is a disk of the machine.
func (s *state) checkDevice(number uint64) error {
	for _, d := range s.Hotplugged {
		if d.Device == number {
			return fmt.Errorf("the device is the machine's disk %s: %w", d.Name, errdefs.ErrFailedPrecondition)
		}
	}
	for _, d := range s.Definition.Disks {
		if other, err := deviceNumber(os.Stat(d.Path)); err == nil && other == number {
			return fmt.Errorf("the device is the machine's disk %s: %w", d.ID, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// freeLUN returns the lowest LUN that no disk has.
func (s *state) freeLUN() int {
	lun := 0
	for slices.ContainsFunc(s.Hotplugged, func(d hotplugged) bool { return d.LUN == lun }) {
		lun++
	}
	return lun
}

// deviceNumber returns the number of a block device. It takes the results of Stat.
func deviceNumber(info fs.FileInfo, err error) (uint64, error) {
	if err != nil {
		return 0, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode().Type() != os.ModeDevice {
		return 0, fmt.Errorf("is not a block device: %w", errdefs.ErrInvalidArgument)
	}
	return st.Rdev, nil
}

// openUnusedDevice opens a block device of the node. If it is opened for writing, the node cannot mount it until the file is
// closed, and openUnusedDevice returns errdefs.ErrFailedPrecondition for a device that is mounted.
func openUnusedDevice(path string, readOnly bool) (*os.File, error) {
	file, err := openBlockDevice(path, readOnly)
	if err != nil || readOnly {
		return file, err
	}
	defer file.Close()
	if locked, err := unix.IoctlGetInt(int(file.Fd()), unix.BLKROGET); err == nil && locked != 0 {
		return nil, fmt.Errorf("is not writable; attach it read-only: %w", errdefs.ErrInvalidArgument)
	}
	claimed, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", file.Fd()), os.O_RDWR|unix.O_EXCL|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("is mounted or in use on the node; attach it read-only, or unmount it: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return claimed, nil
}
