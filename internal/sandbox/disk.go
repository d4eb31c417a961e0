package sandbox

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// DiskError adds an errdefs class to an error from a file operation. The class is ErrResourceExhausted if disk space,
// memory or file descriptors have run out, and ErrUnavailable if the disk fails or is read-only. DiskError returns
// other errors unchanged.
func DiskError(err error) error {
	for _, exhausted := range []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM} {
		if errors.Is(err, exhausted) {
			return fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
		}
	}
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EIO) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	return err
}

// ReadOnlyDisk reports whether err says that a file system is full or read-only. In both cases, existing files can
// still be read.
func ReadOnlyDisk(err error) bool { return errors.Is(err, unix.EROFS) || errors.Is(err, unix.ENOSPC) }
