package sandbox

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// DiskError gives an error of a full or failing disk its class: the node is out of something, and the request was in order. Other
// errors stay as they are.
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

// ReadOnlyDisk reports whether a file system takes no writes, full or read-only: what is there already can be served still.
func ReadOnlyDisk(err error) bool { return errors.Is(err, unix.EROFS) || errors.Is(err, unix.ENOSPC) }
