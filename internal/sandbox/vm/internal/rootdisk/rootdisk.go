package rootdisk

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
)

// Lines at which the crash tests stop the program.
var (
	fpMarked   = failpoint.New("rootdisk.marked")
	fpCopying  = failpoint.New("rootdisk.copying")
	fpCopied   = failpoint.New("rootdisk.copied")
	fpSynced   = failpoint.New("rootdisk.synced")
	fpComplete = failpoint.New("rootdisk.complete")
)

// Overwrite says which devices may lose what they hold. A disk that an interrupted copy has left is always overwritten, and
// the complete disk of the same image is always kept.
type Overwrite string

// What may be overwritten; the empty value is OverwriteNever.
const (
	// OverwriteNever: only what is empty is written to.
	OverwriteNever Overwrite = "never"
	// OverwriteForeign: what is no root disk, too.
	OverwriteForeign Overwrite = "foreign"
	// OverwriteImage: the root disk of another image, too.
	OverwriteImage Overwrite = "image"
)

// Disk is a root disk that is complete.
type Disk struct {
	// ID is that of the copy: another one at the same path is another disk.
	ID string
	// Offset and Size say where the guest's disk is on the device, in bytes.
	Offset, Size uint64
	// Image is the ID of the image of which it was made.
	Image string
	// Copied says that it was made now.
	Copied bool
}

// Prepare makes the device at path the root disk of a machine: it copies the image onto a device that is empty, and keeps
// the disk of one that is complete. A device that holds something else, or is in use, is errdefs.ErrFailedPrecondition and
// says what may be done, one that is too small errdefs.ErrInvalidArgument. Whenever it ends early, the device is not
// complete, and the next call starts again (fault V4).
func Prepare(ctx context.Context, path string, src Source, over Overwrite) (Disk, error) {
	dev, err := openDevice(path, false)
	if err != nil {
		return Disk{}, fmt.Errorf("root disk %s: %w", path, err)
	}
	have, err := survey(dev, src, over)
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

// Check tells whether the device at path still holds the complete disk with this ID: errdefs.ErrFailedPrecondition when not.
func Check(path, id string) error {
	dev, err := openDevice(path, false)
	if err != nil {
		return fmt.Errorf("root disk %s: %w", path, err)
	}
	defer dev.Close()
	m, there, err := read(dev)
	switch {
	case err != nil:
		return fmt.Errorf("root disk %s: %w", path, err)
	case !there || m.Stage != stageComplete || m.id() != id:
		return fmt.Errorf("root disk %s: the device does not hold the disk any more with which the container was created: %w", path, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// prepare is Prepare on a device that is ours alone.
func prepare(ctx context.Context, dev device, src Source, over Overwrite) (Disk, error) {
	have, err := survey(dev, src, over) // it may have changed before it was ours
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
		func() error { return put(dev, m) },
		func() error { return fpMarked.Hit(ctx) },
		func() error { return src.copyTo(ctx, dev) },
		func() error { return fpCopied.Hit(ctx) },
		dev.Sync,
		func() error { return fpSynced.Hit(ctx) },
		func() error { m.Stage = stageComplete; return put(dev, m) },
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

// survey tells what to do with a device: its disk is kept, or nothing stands in the way of a copy (nil), or it is refused.
func survey(dev device, src Source, over Overwrite) (*Disk, error) {
	if len(src.Image) == 0 || len(src.Image) > maxImage || bytes.ContainsRune([]byte(src.Image), 0) {
		return nil, fmt.Errorf("image ID %q: %w", src.Image, errdefs.ErrInvalidArgument)
	}
	m, there, err := read(dev)
	if err != nil && over != OverwriteForeign && over != OverwriteImage {
		return nil, fmt.Errorf("%w; the annotation root-device-overwrite: foreign has it overwritten", err)
	}
	if err == nil && there && m.Stage == stageComplete && (m.image() == src.Image || over != OverwriteImage) {
		d := m.disk(dev)
		return &d, nil
	}
	if room := dev.Size() - Offset; room < 0 || src.Size > uint64(room) {
		return nil, fmt.Errorf("it has %d bytes, and the image's disk of %d with the mark before it wants %d: %w",
			dev.Size(), src.Size, src.Size+Offset, errdefs.ErrInvalidArgument)
	}
	if there || over == OverwriteForeign || over == OverwriteImage {
		return nil, nil // ours, half copied or of another image; or overwriting was asked for
	}
	empty, err := blank(dev)
	if err != nil {
		return nil, err
	}
	if !empty {
		return nil, fmt.Errorf("it is neither empty nor a root disk of Tripod's, and is not overwritten; the annotation root-device-overwrite: foreign says otherwise: %w", errdefs.ErrFailedPrecondition)
	}
	return nil, nil
}

func (m mark) disk(dev device) Disk {
	return Disk{ID: m.id(), Offset: Offset, Size: uint64(dev.Size()-Offset) &^ (markSize - 1), Image: m.image()}
}

// put writes the mark, and returns when it is on the disk.
func put(dev device, m mark) error {
	if _, err := dev.WriteAt(m.encode(), 0); err != nil {
		return err
	}
	return dev.Sync()
}

func read(dev device) (mark, bool, error) {
	if dev.Size() < Offset {
		return mark{}, false, nil
	}
	raw := make([]byte, markSize)
	if _, err := dev.ReadAt(raw, 0); err != nil {
		return mark{}, false, err
	}
	return decode(raw)
}

// blank looks where partition tables and file systems have their beginnings and their backups: the first 2 MiB and the last.
func blank(dev device) (bool, error) {
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
	for len(buf) > 0 {
		n := min(len(buf), len(zeroes))
		if !bytes.Equal(buf[:n], zeroes[:n]) {
			return false
		}
		buf = buf[n:]
	}
	return true
}
