package vm

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/blockdev"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/hotplug"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var (
	fpDiskAttaching = failpoint.New("vm.disk.attaching")
	fpDiskPlugged   = failpoint.New("vm.disk.plugged")
	fpDiskDetaching = failpoint.New("vm.disk.detaching")
	fpDiskUnplugged = failpoint.New("vm.disk.unplugged")
)

// hotplugSlots is how many disks and NICs a machine that can get further disks has at most. The port for them takes one of
// about 20 free PCI slots, which a machine with more devices may need.
const hotplugSlots = 14

// AttachDisk implements sandbox.DiskAttacher.
func (b *Backend) AttachDisk(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, d sandbox.Disk) error {
	h, l, err := b.hotpluggable(p, c)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	had, known := s.Hotplugged.Find(d.Name)
	switch {
	case !known:
	case had.Phase == hotplug.Attached && had.Path == d.Path && had.ReadOnly == d.ReadOnly:
		return nil
	case had.Phase == hotplug.Attached:
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
	disk, known := s.Hotplugged.Find(name)
	if !known {
		return fmt.Errorf("no disk %q was attached to the machine while it runs: %w", name, errdefs.ErrNotFound)
	}
	return b.unplug(ctx, h, l, disk)
}

// hotpluggable returns the run of a machine that can get further disks.
func (b *Backend) hotpluggable(p *sandbox.Pod, c *sandbox.Container) (*handle, *life, error) {
	if b.cfg.Driver.Name() == DriverLibvirt {
		return nil, nil, fmt.Errorf("this node's driver libvirt cannot attach disks to running machines; set vm.driver = \"qmp\": %w",
			errdefs.ErrNotImplemented)
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
	if err := s.Hotplugged.CheckName(s.Definition, d.Name); err != nil {
		return err
	}
	file, err := blockdev.OpenUnused(d.Path, d.ReadOnly)
	if err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	defer file.Close()
	wanted := machine.PlugDisk{LUN: s.Hotplugged.FreeLUN(), Serial: d.Name, File: file, ReadOnly: d.ReadOnly}
	if wanted.LogicalBlock, wanted.PhysicalBlock, err = blockdev.Sectors(file); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	number, err := blockdev.Number(file.Stat())
	if err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	if err := s.Hotplugged.CheckDevice(s.Definition, number); err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	disk := hotplug.Disk{Name: d.Name, Path: d.Path, ReadOnly: d.ReadOnly, Phase: hotplug.Attaching, LUN: wanted.LUN, Device: number}
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
	disk.Phase = hotplug.Attached
	return setDisk(h, l, disk)
}

// unplug takes a disk away from the machine, whatever its phase is.
func (b *Backend) unplug(ctx context.Context, h *handle, l *life, disk hotplug.Disk) error {
	disk.Phase = hotplug.Detaching
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
	return changeDisks(h, l, func(others hotplug.Disks) hotplug.Disks { return others.Without(disk.Name) })
}

// setDisk records a disk, in place of the one with its name.
func setDisk(h *handle, l *life, disk hotplug.Disk) error {
	return changeDisks(h, l, func(others hotplug.Disks) hotplug.Disks { return others.With(disk) })
}

// changeDisks records the disks of a run. It returns errdefs.ErrFailedPrecondition if the run has ended.
func changeDisks(h *handle, l *life, change func(hotplug.Disks) hotplug.Disks) error {
	current, err := h.Update(l, func(s *state) { s.Hotplugged = change(s.Hotplugged) })
	if err == nil && !current {
		err = fmt.Errorf("the machine has ended: %w", errdefs.ErrFailedPrecondition)
	}
	return err
}
