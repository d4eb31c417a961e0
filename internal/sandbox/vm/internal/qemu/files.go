package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

const vhostNet = "/dev/vhost-net"

// openers provides the files that have no path: taps and connections to virtiofsd.
type openers struct {
	taps   machine.Opener
	shares *virtiofsd.Servers
	memory *os.File // the guest's, or nil; the machine gets a duplicate
}

// openAll opens the given files in order. It returns errdefs.ErrFailedPrecondition for a file that is missing or
// unusable.
func openAll(ctx context.Context, d machine.Definition, files []inherited, from openers) (opened []*os.File, err error) {
	defer func() {
		if err != nil {
			closeAll(opened)
			opened = nil
		}
	}()
	for _, f := range files {
		if err := context.Cause(ctx); err != nil {
			return opened, err
		}
		file, err := openOne(ctx, d, f, from)
		if err != nil {
			return opened, withClass(fmt.Errorf("open the machine's files: %w", err))
		}
		opened = append(opened, file)
	}
	return opened, nil
}

func openOne(ctx context.Context, d machine.Definition, f inherited, from openers) (*os.File, error) {
	switch f.Kind {
	case kindSocket:
		return unixsocket.Listen(f.Path)
	case kindPipe:
		return machine.MakePipe(f.Path)
	case kindRead, kindWrite:
		file, _, err := OpenDisk(f.Path, f.Kind == kindRead)
		return file, err
	case kindAppend:
		return OpenSerialLog(f.Path)
	case kindBoot:
		return OpenBoot(f.Path)
	case kindTap:
		if from.taps == nil {
			return nil, fmt.Errorf("the driver has no opener for taps: %w", errdefs.ErrFailedPrecondition)
		}
		file, err := from.taps.Tap(ctx, d.NICs[f.Index])
		if err != nil {
			return nil, fmt.Errorf("tap %s: %w", d.NICs[f.Index].Tap, err)
		}
		return file, nil
	case kindVhost:
		return os.OpenFile(f.Path, os.O_RDWR, 0)
	case kindShare:
		return OpenShare(f.Path, false, d.UID, d.GID)
	case kindShareRO:
		return OpenShare(f.Path, true, d.UID, d.GID)
	case kindVirtiofs:
		return from.shares.Conn(d.Shares[f.Index].Tag)
	case kindOwnedDir:
		return OpenOwned(f.Path, d.UID, d.GID)
	case kindMemory:
		fd, err := unix.FcntlInt(from.memory.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		return os.NewFile(uintptr(fd), from.memory.Name()), os.NewSyscallError("fcntl", err)
	case kindGrowth:
		return memoryFile("tripod-growth", nil, int64(growthRegion(d)))
	default:
		return nil, fmt.Errorf("unknown kind of file %q: %w", f.Kind, errdefs.ErrInvalidArgument)
	}
}

// OpenDisk opens a regular file or a block device, and reports whether it is a block device. OpenDisk does not block on
// a named pipe.
func OpenDisk(path string, readOnly bool) (file *os.File, device bool, err error) {
	flags := os.O_RDWR
	if readOnly {
		flags = os.O_RDONLY
	}
	if file, err = os.OpenFile(path, flags|unix.O_NONBLOCK, 0); err != nil {
		return nil, false, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() && !isBlock(info) {
		err = fmt.Errorf("%s is neither a file nor a block device: %w", path, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		file.Close()
		return nil, false, err
	}
	return file, isBlock(info), nil
}

func isBlock(info fs.FileInfo) bool {
	return info.Mode()&fs.ModeDevice != 0 && info.Mode()&fs.ModeCharDevice == 0
}

// blockDevice reports whether path is a block device.
func blockDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && isBlock(info)
}

// OpenBoot opens a kernel or initrd. QEMU opens the file again through /proc/self/fd, and for that, Linux checks the
// file's mode. If other users may not read the file, OpenBoot returns a copy in memory.
func OpenBoot(path string) (*os.File, error) {
	f, _, err := OpenDisk(path, true)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err == nil && info.Mode()&0o004 != 0 {
		return f, nil
	}
	defer f.Close()
	memory, err := memoryFile("tripod-boot", nil, 0)
	if err != nil {
		return nil, fmt.Errorf("copy %s to memory: %w", path, err)
	}
	if _, err := io.Copy(memory, f); err != nil {
		memory.Close()
		return nil, fmt.Errorf("copy %s to memory: %w", path, err)
	}
	return memory, nil
}

// OpenOwned replaces path with an empty directory that belongs to QEMU's user, and opens it.
func OpenOwned(path string, uid, gid int) (*os.File, error) {
	if err := os.RemoveAll(path); err != nil { // left by an earlier run
		return nil, err
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := f.Chown(uid, gid); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// OpenShare opens a directory for virtio-9p. If the file system can map owners, files of root appear there as files of
// QEMU's user.
func OpenShare(path string, readOnly bool, uid, gid int) (*os.File, error) {
	tree, _, err := virtiofsd.Open(path, readOnly, uid, gid)
	return tree, err
}

// OpenSerialLog opens the serial console's log for appending.
func OpenSerialLog(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// withClass adds an errdefs class to an error that has none.
func withClass(err error) error {
	for _, class := range []error{
		errdefs.ErrFailedPrecondition, errdefs.ErrUnavailable, errdefs.ErrNotFound, errdefs.ErrInvalidArgument,
		errdefs.ErrResourceExhausted, errdefs.ErrNotImplemented, context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, class) {
			return err
		}
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("%w (%w)", err, errdefs.ErrResourceExhausted)
	}
	return fmt.Errorf("%w (%w)", err, errdefs.ErrFailedPrecondition)
}
