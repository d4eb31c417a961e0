package rootdisk

import (
	"bytes"
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
	// varsHeaders is the size of OVMF's two headers in front of the variables: of the firmware volume (72 bytes; UEFI PI
	// Specification, volume 3) and of the variable store (28 bytes; VariableFormat.h in EDK II). They do not change, but
	// are erased for a moment when the firmware compacts the variables. OVMF hangs if they are damaged.
	varsHeaders = 100
)

// VarsFit reports whether UEFI variables of size bytes fit on the device.
func VarsFit(size int) bool { return size > 0 && size <= maxVars && size%markSize == 0 }

// KeepVars makes sure that the device at path holds UEFI variables beside the complete disk with the given ID. It keeps
// variables that have the size and the headers of the firmware's template. Otherwise it writes the template, and returns
// the size of the variables that it replaced, or 0 if there were none. It returns errdefs.ErrInvalidArgument for a
// template that does not fit, and errdefs.ErrFailedPrecondition for a device that no longer holds the disk, or is in use
// when the template must be written. After an interrupted call, the device holds the earlier variables, none, or the
// whole template.
func KeepVars(ctx context.Context, path, id string, template []byte) (replaced uint64, err error) {
	if !VarsFit(len(template)) {
		return 0, fmt.Errorf("root disk %s: a template of %d bytes for the UEFI variables does not fit: %w", path, len(template),
			errdefs.ErrInvalidArgument)
	}
	for _, write := range []bool{false, true} { // another machine may use the device, so do not write to it without need
		dev, err := openDevice(path, write)
		if err != nil {
			return 0, fmt.Errorf("root disk %s: %w", path, err)
		}
		m, kept, err := findVars(dev, id, template)
		if write && err == nil && !kept {
			replaced, err = m.VarsSize, writeVars(ctx, dev, m, template)
		}
		dev.Close()
		if err != nil {
			return 0, fmt.Errorf("root disk %s: UEFI variables: %w", path, err)
		}
		if kept {
			break
		}
	}
	return replaced, nil
}

// findVars returns the mark of the complete disk with the given ID, and whether the device holds variables that match the
// template.
func findVars(dev device, id string, template []byte) (m mark, kept bool, err error) {
	if m, err = checkedMark(dev, id); err != nil || m.VarsSize != uint64(len(template)) {
		return m, false, err
	}
	headers := make([]byte, varsHeaders)
	if _, err := dev.ReadAt(headers, VarsOffset); err != nil {
		return m, false, err
	}
	return m, bytes.Equal(headers, template[:varsHeaders]), nil
}

// writeVars replaces the variables by the template. The device is open exclusively and has the mark m.
func writeVars(ctx context.Context, dev device, m mark, template []byte) error {
	steps := []func() error{
		func() error {
			if m.VarsSize == 0 {
				return nil
			}
			m.VarsSize = 0
			return writeMark(dev, m)
		},
		func() error { return fpVarsDropped.Hit(ctx) },
		func() error { _, err := dev.WriteAt(template, VarsOffset); return err },
		dev.Sync,
		func() error { return fpVarsWritten.Hit(ctx) },
		func() error { m.VarsSize = uint64(len(template)); return writeMark(dev, m) },
		func() error { return fpVarsMarked.Hit(ctx) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}
