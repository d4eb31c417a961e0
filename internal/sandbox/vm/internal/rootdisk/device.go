package rootdisk

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// device is the device of a root disk.
type device interface {
	io.ReaderAt
	io.WriterAt
	// Zero zeroes length bytes at offset.
	Zero(offset, length int64) error
	// Sync flushes all writes to the disk.
	Sync() error
	// Size returns the size in bytes.
	Size() int64
}

// blockDevice is a block device of the node.
type blockDevice struct {
	*os.File
	size int64
}

// QEMU locks these bytes of an image file, one for each permission that it uses or shares (block/file-posix.c in QEMU's
// source).
const (
	lockStart = 100
	lockBytes = 200
)

// openDevice opens a block device for reading. If write is set, it opens the device for writing as well, exclusively
// and locked against QEMU. It returns errdefs.ErrFailedPrecondition for a device that is mounted or in use by a
// machine, and errdefs.ErrInvalidArgument for a path that does not exist, is not a block device or may not be written.
func openDevice(path string, write bool) (*blockDevice, error) {
	flags := os.O_RDONLY
	if write {
		flags = os.O_RDWR | unix.O_EXCL
	}
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("%w: it is mounted, or another copy to it is running: %w", err, errdefs.ErrFailedPrecondition)
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EACCES), errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	case err != nil:
		return nil, err
	}
	d := &blockDevice{File: f}
	if err := d.claim(write); err != nil {
		f.Close()
		return nil, err
	}
	return d, nil
}

func (d *blockDevice) claim(write bool) error {
	info, err := d.Stat()
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeDevice {
		return fmt.Errorf("it is not a block device: %w", errdefs.ErrInvalidArgument)
	}
	if d.size, err = d.Seek(0, io.SeekEnd); err != nil || !write {
		return err
	}
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: lockStart, Len: lockBytes}
	err = unix.FcntlFlock(d.Fd(), unix.F_OFD_SETLK, &lock)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("it is in use by a machine: %w", errdefs.ErrFailedPrecondition)
	}
	return err
}

func (d *blockDevice) Size() int64 { return d.size }

// zeroBlock is the size of the blocks of zeros that Zero writes if fallocate cannot zero a range of the device.
const zeroBlock = 1 << 20

func (d *blockDevice) Zero(offset, length int64) error {
	for _, mode := range []uint32{unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE} {
		if unix.Fallocate(int(d.Fd()), mode, offset, length) == nil {
			return nil
		}
	}
	zeroes := make([]byte, min(length, zeroBlock))
	for length > 0 {
		n, err := d.WriteAt(zeroes[:min(length, int64(len(zeroes)))], offset)
		if err != nil {
			return err
		}
		offset, length = offset+int64(n), length-int64(n)
	}
	return nil
}
