package rootdisk

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
)

var (
	fpVarsDropped = failpoint.New("rootdisk.vars-dropped")
	fpVarsWritten = failpoint.New("rootdisk.vars-written")
	fpVarsMarked  = failpoint.New("rootdisk.vars-marked")
)

const (
	// VarsOffset is the offset of the UEFI variables on the device, in bytes. It leaves room for more marks, and is a
	// multiple of the blocks of all devices.
	VarsOffset = 256 << 10
	// maxVars is the space for the variables in bytes. OVMF has 128 or 528 KiB of them.
	maxVars = Offset - VarsOffset
)

// VarsFit reports whether UEFI variables of size bytes fit on the device.
func VarsFit(size int) bool { return size > 0 && size <= maxVars && size%markSize == 0 }

// KeepVars makes sure that the device at path holds UEFI variables beside the complete disk with the given ID. It keeps
// variables that have the size of the firmware's template. Otherwise it writes the template, and returns the size of the
// variables that it replaced, or 0 if there were none. It returns errdefs.ErrInvalidArgument for a template that does not
// fit, and errdefs.ErrFailedPrecondition for a device that no longer holds the disk, or is in use when the template must
// be written. After an interrupted call, the device holds the earlier variables, none, or the whole template.
func KeepVars(ctx context.Context, path, id string, template []byte) (replaced uint64, err error) {
	if !VarsFit(len(template)) {
		return 0, fmt.Errorf("root disk %s: a template of %d bytes for the UEFI variables does not fit: %w", path, len(template), errdefs.ErrInvalidArgument)
	}
	// Another machine may use the device, so do not open it for writing without need.
	err = Check(path, id, uint64(len(template)))
	if !errdefs.IsFailedPrecondition(err) {
		return 0, err
	}
	dev, err := openDevice(path, true)
	if err != nil {
		return 0, fmt.Errorf("root disk %s: %w", path, err)
	}
	defer dev.Close()
	if replaced, err = keepVars(ctx, dev, id, template); err != nil {
		return 0, fmt.Errorf("root disk %s: UEFI variables: %w", path, err)
	}
	return replaced, nil
}

// keepVars is KeepVars for a device that is open exclusively.
func keepVars(ctx context.Context, dev device, id string, template []byte) (replaced uint64, err error) {
	m, err := completeMark(dev, id)
	size := uint64(len(template))
	if err != nil || m.VarsSize == size {
		return 0, err
	}
	replaced = m.VarsSize
	steps := []func() error{
		func() error {
			if replaced == 0 {
				return nil
			}
			m.VarsSize = 0
			return writeMark(dev, m)
		},
		func() error { return fpVarsDropped.Hit(ctx) },
		func() error { _, err := dev.WriteAt(template, VarsOffset); return err },
		dev.Sync,
		func() error { return fpVarsWritten.Hit(ctx) },
		func() error { m.VarsSize = size; return writeMark(dev, m) },
		func() error { return fpVarsMarked.Hit(ctx) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return 0, err
		}
	}
	return replaced, nil
}
