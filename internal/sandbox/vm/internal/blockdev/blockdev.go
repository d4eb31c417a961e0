// Package blockdev opens block devices of the node that become disks of machines. Begin with Open, or with OpenUnused for a disk
// that a running machine gets. The package must not know about drivers: a caller passes on the open file.
package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Open opens a block device of the node for a guest.
func Open(path string, readOnly bool) (*os.File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if info.Mode()&os.ModeDevice == 0 || info.Mode()&os.ModeCharDevice != 0 {
		return nil, fmt.Errorf("is not a block device, the only kind of device that a machine can have: %w", errdefs.ErrNotImplemented)
	}
	flags := os.O_RDWR
	if readOnly {
		flags = os.O_RDONLY
	}
	file, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
	if !readOnly && (errors.Is(err, os.ErrPermission) || errors.Is(err, unix.EROFS)) {
		return nil, fmt.Errorf("is not writable, but was not requested read-only: %w", errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return file, nil
}

// OpenUnused opens a block device of the node. If it is opened for writing, the node cannot mount it until the file is
// closed, and OpenUnused returns errdefs.ErrFailedPrecondition for a device that is mounted.
func OpenUnused(path string, readOnly bool) (*os.File, error) {
	file, err := Open(path, readOnly)
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

// Sectors returns the sizes in bytes of a block device's logical and physical sectors. A guest that saw others would not
// find the partitions and file systems that the node made, and the other way round.
func Sectors(device *os.File) (logical, physical int, err error) {
	if logical, err = unix.IoctlGetInt(int(device.Fd()), unix.BLKSSZGET); err != nil {
		return 0, 0, fmt.Errorf("the sector size of %s: %w", device.Name(), err)
	}
	if physical, err = unix.IoctlGetInt(int(device.Fd()), unix.BLKPBSZGET); err != nil {
		return 0, 0, fmt.Errorf("the sector size of %s: %w", device.Name(), err)
	}
	return logical, physicalBlock(logical, physical), nil
}

// physicalBlock returns the size of physical sectors for QEMU, which takes only powers of two up to 2 MiB that are not
// less than the logical size. The size is a hint for the guest, and some devices report one that is none of these.
func physicalBlock(logical, physical int) int {
	const most = 2 << 20
	if physical < logical || physical > most || physical&(physical-1) != 0 {
		return logical
	}
	return physical
}

// Number returns the number of a block device. It takes the results of Stat.
func Number(info fs.FileInfo, err error) (uint64, error) {
	if err != nil {
		return 0, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode().Type() != os.ModeDevice {
		return 0, fmt.Errorf("is not a block device: %w", errdefs.ErrInvalidArgument)
	}
	return st.Rdev, nil
}
