// Package hotplug keeps account of the disks that a running machine has got in addition to those of its definition. Begin with
// Disks. The package must not plug anything: the backend does, by the driver.
package hotplug

import (
	"fmt"
	"os"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/blockdev"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// maxDisks is how many disks a running machine can get.
const maxDisks = 64

// nameForm is what a guest can have as the serial number of a SCSI disk.
var nameForm = lazyregexp.New(`^[a-zA-Z0-9][a-zA-Z0-9_-]{0,19}$`)

// Phase is the phase of a disk. Those other than Attached are written before the driver is called, so they remain if the call is
// interrupted. A repeated call completes it.
//
//	(none) ── AttachDisk ──▶ attaching ──▶ attached
//	   ▲                         │            │
//	   └──────── detaching ◀─────┴────────────┘ DetachDisk, or Plug has failed
type Phase string

// The phases of a disk.
const (
	Attaching Phase = "attaching"
	Attached  Phase = "attached"
	Detaching Phase = "detaching"
)

// Disk is a disk that a running machine got by AttachDisk. The disk is gone when the machine ends.
type Disk struct {
	Name     string `json:"name"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	Phase    Phase  `json:"phase"`
	LUN      int    `json:"lun"`
	// Device is the block device's number.
	Device uint64 `json:"device"`
}

// Disks are those of a machine. They are part of the state file of its container.
type Disks []Disk

// Find returns the disk with the given name, and whether there is one.
func (d Disks) Find(name string) (Disk, bool) {
	i := slices.IndexFunc(d, func(d Disk) bool { return d.Name == name })
	if i < 0 {
		return Disk{}, false
	}
	return d[i], true
}

// With returns a copy with the given disk in place of the one with its name.
func (d Disks) With(disk Disk) Disks { return append(d.Without(disk.Name), disk) }

// Without returns a copy that lacks the named disk.
func (d Disks) Without(name string) Disks {
	return slices.DeleteFunc(slices.Clone(d), func(d Disk) bool { return d.Name == name })
}

// CheckName refuses the name of a new disk if no disk can have it, or another disk of the machine, whose definition is given, has
// it.
func (d Disks) CheckName(m machine.Definition, name string) error {
	switch {
	case !nameForm().MatchString(name):
		return fmt.Errorf("the name %q of a disk is not 1 to 20 letters, digits, - and _, beginning with a letter or a digit: %w", name,
			errdefs.ErrInvalidArgument)
	case slices.ContainsFunc(m.Disks, func(d machine.Disk) bool { return d.ID == name }):
		return fmt.Errorf("the machine was made with a disk %s: %w", name, errdefs.ErrAlreadyExists)
	case len(d) >= maxDisks:
		return fmt.Errorf("%d disks are attached to the machine, the maximum: %w", len(d), errdefs.ErrResourceExhausted)
	}
	return nil
}

// CheckDevice returns errdefs.ErrFailedPrecondition if the block device with this number is a disk of the machine, whose
// definition is given.
func (d Disks) CheckDevice(m machine.Definition, number uint64) error {
	for _, d := range d {
		if d.Device == number {
			return fmt.Errorf("the device is the machine's disk %s: %w", d.Name, errdefs.ErrFailedPrecondition)
		}
	}
	for _, d := range m.Disks {
		if other, err := blockdev.Number(os.Stat(d.Path)); err == nil && other == number {
			return fmt.Errorf("the device is the machine's disk %s: %w", d.ID, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// FreeLUN returns the lowest LUN that no disk has.
func (d Disks) FreeLUN() int {
	lun := 0
	for slices.ContainsFunc(d, func(d Disk) bool { return d.LUN == lun }) {
		lun++
	}
	return lun
}
