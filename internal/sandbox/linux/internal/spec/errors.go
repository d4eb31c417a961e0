package spec

import (
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// invalid is the refusal of a field whose value cannot be right.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// unsupported is the refusal of a field that is right but that this host, or this backend, cannot honour.
func unsupported(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrNotImplemented)
}

// blame gives a failed look at, or change of, a file that a field names to whom it belongs: the node when it is out
// of something or its disk fails, else the caller.
func blame(field string, err error) error {
	for _, exhausted := range []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM} {
		if errors.Is(err, exhausted) {
			return fmt.Errorf("%s: %w: %w", field, err, errdefs.ErrResourceExhausted)
		}
	}
	if errors.Is(err, unix.EIO) {
		return fmt.Errorf("%s: %w", field, err)
	}
	return fmt.Errorf("%s: %w: %w", field, err, errdefs.ErrInvalidArgument)
}

// checkText refuses text that would be cut short on its way to the kernel, which ends strings at a NUL.
func checkText(field, s string) error {
	if strings.ContainsRune(s, 0) {
		return invalid(field, "%q contains a NUL byte", s)
	}
	return nil
}
