package rootdisk

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
)

var (
	fpMarked   = failpoint.New("rootdisk.marked")
	fpCopying  = failpoint.New("rootdisk.copying")
	fpCopied   = failpoint.New("rootdisk.copied")
	fpSynced   = failpoint.New("rootdisk.synced")
	fpComplete = failpoint.New("rootdisk.complete")
)

// Overwrite says which content of a device may be overwritten. The disk of an interrupted copy is always overwritten,
// and the complete disk of the same image is always kept.
type Overwrite string

// Values of Overwrite; the empty value means OverwriteNever.
const (
	// OverwriteNever allows only an empty device.
	OverwriteNever Overwrite = "never"
	// OverwriteForeign also allows content that is not a root disk.
	OverwriteForeign Overwrite = "foreign"
	// OverwriteImage also allows the root disk of another image.
	OverwriteImage Overwrite = "image"
)

// Disk is a complete root disk.
type Disk struct {
	// ID identifies the copy. Each copy has a new ID, even at the same path.
	ID string
	// Offset and Size are the position and size of the guest's disk on the device, in bytes.
	Offset, Size uint64
	// Image is the ID of the copied image.
	Image string
	// Copied is set if this call made the copy.
	Copied bool
}

// Prepare makes the device at path the root disk of a machine. It copies the image to an empty device and keeps the
// disk of a complete device. It returns errdefs.ErrFailedPrecondition, with advice, for a device that has other content
// or is in use, and errdefs.ErrInvalidArgument for a device that is too small. If a call is interrupted, the device
// stays incomplete, and the next call restarts the copy (fault V4).
func Prepare(ctx context.Context, path string, src Source, over Overwrite) (Disk, error) {
	dev, err := openDevice(path, false)
	if err != nil {
		return Disk{}, fmt.Errorf("root disk %s: %w", path, err)
	}
	have, err := inspect(dev, src, over)
	dev.Close()
	if err != nil {
		return Disk{}, fmt.Errorf("root disk %s: %w", path, err)
	}
	if have != nil {
		return *have, nil
	}
	if dev, err = openDevice(path, true); err != nil {
		return Disk{}, fmt.Errorf("root disk %s: %w", path, err)
	}
	defer dev.Close()
	d, err := prepare(ctx, dev, src, over)
	if err != nil {
		return Disk{}, fmt.Errorf("root disk %s: %w", path, err)
	}
	return d, nil
}

// Check returns errdefs.ErrFailedPrecondition if the device at path no longer holds the complete disk with the given
// ID, or UEFI variables of vars bytes. If vars is 0, the machine does not use the variables on the device.
func Check(path, id string, vars uint64) error {
	dev, err := openDevice(path, false)
	if err != nil {
		return fmt.Errorf("root disk %s: %w", path, err)
	}
	defer dev.Close()
	m, err := checkedMark(dev, id)
	if err == nil && vars > 0 && m.VarsSize != vars {
		err = fmt.Errorf("its UEFI variables have %d bytes, but had %d when the container was created: %w", m.VarsSize, vars,
			errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("root disk %s: %w", path, err)
	}
	return nil
}

// checkedMark returns the mark of the complete disk with the given ID, or errdefs.ErrFailedPrecondition if the device
// does not hold it.
func checkedMark(dev device, id string) (mark, error) {
	m, found, err := readMark(dev)
	if err == nil && (!found || m.Stage != stageComplete || m.id() != id) {
		err = fmt.Errorf("the device no longer holds the disk with which the container was created: %w", errdefs.ErrFailedPrecondition)
	}
	return m, err
}

// prepare is Prepare for a device that is open exclusively.
func prepare(ctx context.Context, dev device, src Source, over Overwrite) (Disk, error) {
	have, err := inspect(dev, src, over) // the device may have changed before the exclusive open
	if err != nil {
		return Disk{}, err
	}
	if have != nil {
		return *have, nil
	}
	m := mark{Magic: magic, Version: version, Stage: stageWriting, ImageSize: src.Size}
	copy(m.Image[:], src.Image)
	if _, err := rand.Read(m.ID[:]); err != nil {
		return Disk{}, err
	}
	steps := []func() error{
		func() error { return writeMark(dev, m) },
		func() error { return fpMarked.Hit(ctx) },
		func() error { return src.copyTo(ctx, dev) },
		func() error { return fpCopied.Hit(ctx) },
		dev.Sync,
		func() error { return fpSynced.Hit(ctx) },
		func() error { m.Stage = stageComplete; return writeMark(dev, m) },
		func() error { return fpComplete.Hit(ctx) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return Disk{}, err
		}
	}
	d := m.disk(dev)
	d.Copied = true
	return d, nil
}

// inspect decides what to do with a device. It returns the disk to keep, nil if a copy may begin, or an error.
func inspect(dev device, src Source, over Overwrite) (*Disk, error) {
	if len(src.Image) == 0 || len(src.Image) > maxImage || bytes.ContainsRune([]byte(src.Image), 0) {
		return nil, fmt.Errorf("image ID %q: %w", src.Image, errdefs.ErrInvalidArgument)
	}
	m, found, err := readMark(dev)
	if err != nil && over != OverwriteForeign && over != OverwriteImage {
		return nil, fmt.Errorf("%w; the annotation root-device-overwrite: foreign allows Tripod to overwrite it", err)
	}
	if err == nil && found && m.Stage == stageComplete && (m.image() == src.Image || over != OverwriteImage) {
		d := m.disk(dev)
		return &d, nil
	}
	if room := dev.Size() - Offset; room < 0 || src.Size > uint64(room) {
		return nil, fmt.Errorf("it has %d bytes; the image's disk of %d bytes and the mark need %d: %w",
			dev.Size(), src.Size, src.Size+Offset, errdefs.ErrInvalidArgument)
	}
	if found || over == OverwriteForeign || over == OverwriteImage {
		return nil, nil // an incomplete copy, another image's disk, or content to overwrite
	}
	empty, err := isBlank(dev)
	if err != nil {
		return nil, err
	}
	if !empty {
		return nil, fmt.Errorf("it is neither empty nor a root disk of Tripod; the annotation root-device-overwrite: foreign allows Tripod to overwrite it: %w", errdefs.ErrFailedPrecondition)
	}
	return nil, nil
}

func (m mark) disk(dev device) Disk {
	return Disk{ID: m.id(), Offset: Offset, Size: uint64(dev.Size()-Offset) &^ (markSize - 1), Image: m.image()}
}

// writeMark writes the mark and syncs the device.
func writeMark(dev device, m mark) error {
	if _, err := dev.WriteAt(m.encode(), 0); err != nil {
		return err
	}
	return dev.Sync()
}

func readMark(dev device) (mark, bool, error) {
	if dev.Size() < Offset {
		return mark{}, false, nil
	}
	raw := make([]byte, markSize)
	if _, err := dev.ReadAt(raw, 0); err != nil {
		return mark{}, false, err
	}
	return decode(raw)
}

// isBlank reports whether the device's first 2 MiB and last 1 MiB are zero. Partition tables and file systems have
// their headers there.
func isBlank(dev device) (bool, error) {
	buf := make([]byte, 1<<20)
	for _, at := range []int64{0, Offset, dev.Size() - int64(len(buf))} {
		n := min(int64(len(buf)), dev.Size()-at)
		if _, err := dev.ReadAt(buf[:n], at); err != nil {
			return false, err
		}
		if !isZero(buf[:n]) {
			return false, nil
		}
	}
	return true, nil
}

func isZero(buf []byte) bool {
	return len(buf) == 0 || buf[0] == 0 && bytes.Equal(buf[1:], buf[:len(buf)-1])
}
