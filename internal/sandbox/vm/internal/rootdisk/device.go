package rootdisk

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// device is what a root disk is on.
type device interface {
	io.ReaderAt
	io.WriterAt
	// Zero makes length bytes at offset zero.
	Zero(offset, length int64) error
	// Sync returns when all that was written is on the disk.
	Sync() error
	// Size is in bytes.
	Size() int64
}

// blockDevice is a block device of the node.
type blockDevice struct {
	*os.File
	size int64
}

// The bytes of a file on which QEMU holds locks (its block/file-posix.c): one for each thing that it does or lets do.
const (
	lockStart = 100
	lockBytes = 200
)

// openDevice opens a block device, for us alone when it is to be written. One that is mounted, or in use by a machine, is
// errdefs.ErrFailedPrecondition; what is no block device is errdefs.ErrInvalidArgument.
func openDevice(path string, write bool) (*blockDevice, error) {
	flags := os.O_RDONLY
	if write {
		flags = os.O_RDWR | unix.O_EXCL
	}
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("%w: it is mounted, or somebody else copies to it: %w", err, errdefs.ErrFailedPrecondition)
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

// Size implements device.
func (d *blockDevice) Size() int64 { return d.size }

// zeroes are written where the kernel cannot make zeros by itself.
var zeroes = make([]byte, 1<<20)

// Zero implements device.
func (d *blockDevice) Zero(offset, length int64) error {
	for _, mode := range []uint32{unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE} {
		if unix.Fallocate(int(d.Fd()), mode, offset, length) == nil {
			return nil
		}
	}
	for length > 0 {
		n, err := d.WriteAt(zeroes[:min(length, int64(len(zeroes)))], offset)
		if err != nil {
			return err
		}
		offset, length = offset+int64(n), length-int64(n)
	}
	return nil
}
