package vm

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// noRoom gives an error of a full or failing disk its class: the node is out of something, nobody called wrongly.
func noRoom(err error) error {
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

// readOnly tells that a file system does not take writes: what is there already can be served still.
func readOnly(err error) bool { return errors.Is(err, unix.EROFS) || errors.Is(err, unix.ENOSPC) }
