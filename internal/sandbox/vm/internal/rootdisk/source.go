package rootdisk

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
)

// Source is the image to copy.
type Source struct {
	// Image is the image's ID, 256 bytes at most.
	Image string
	// File holds the disk in the format that Format names, "qcow2" or "raw". FileSize is the file's length in bytes.
	File     io.ReaderAt
	FileSize int64
	Format   string
	// Size is the size of the guest's disk in bytes.
	Size uint64
}

// chunk is the number of bytes of a raw image that are copied in one step.
const chunk = 1 << 20

// copyTo writes the whole disk to the device, behind the mark. It writes zeros too, because the device's old content is
// unknown. It also zeroes the end of the device, where a backup partition table can be.
func (s Source) copyTo(ctx context.Context, dev device) error {
	step, read, done, err := s.open()
	if err != nil {
		return err
	}
	defer done()
	var hole int64 // number of zeros before the current offset that are not written yet
	buf := make([]byte, step)
	at := int64(0)
	flush := func() error {
		if hole == 0 {
			return nil
		}
		begin := Offset + at - hole
		hole = 0
		return dev.Zero(begin, Offset+at-begin)
	}
	for n := uint64(0); at < int64(s.Size); n++ {
		if err := context.Cause(ctx); err != nil {
			return fmt.Errorf("copy the image: %w", err)
		}
		zero, err := read(n, buf)
		if err != nil {
			return fmt.Errorf("copy the image: %w", err)
		}
		part := buf[:min(int64(step), int64(s.Size)-at)]
		if zero || isZero(part) {
			hole += int64(len(part))
		} else {
			if err := flush(); err != nil {
				return fmt.Errorf("copy the image: %w", err)
			}
			if _, err := dev.WriteAt(part, Offset+at); err != nil {
				return fmt.Errorf("copy the image: %w", err)
			}
			if err := fpCopying.Hit(ctx); err != nil {
				return err
			}
		}
		at += int64(len(part))
	}
	if err := flush(); err != nil {
		return fmt.Errorf("copy the image: %w", err)
	}
	if tail := max(Offset+at, dev.Size()-chunk); tail < dev.Size() {
		return dev.Zero(tail, dev.Size()-tail)
	}
	return nil
}

// open opens the image for reading in pieces. It returns the size of a piece in bytes, a function that reads the nth
// piece, and a function that releases the resources.
func (s Source) open() (step int, read func(n uint64, buf []byte) (zero bool, err error), done func(), err error) {
	switch s.Format {
	case "qcow2":
		q, err := qcow2.NewReader(s.File, s.FileSize)
		if err != nil {
			return 0, nil, nil, err
		}
		if q.Info().VirtualSize != s.Size {
			q.Close()
			return 0, nil, nil, fmt.Errorf("the image's disk has %d bytes, expected %d: %w", q.Info().VirtualSize, s.Size,
				errdefs.ErrInvalidArgument)
		}
		return int(q.Info().ClusterSize), q.ReadCluster, q.Close, nil
	case "raw":
		return chunk, func(n uint64, buf []byte) (bool, error) {
			got, err := s.File.ReadAt(buf, int64(n)*chunk)
			if err == io.EOF && uint64(n)*chunk+uint64(got) >= min(s.Size, uint64(s.FileSize)) {
				err = nil
			}
			clear(buf[got:])
			return false, err
		}, func() {}, nil
	}
	return 0, nil, nil, fmt.Errorf("unknown image format %q: %w", s.Format, errdefs.ErrInvalidArgument)
}
