package spec

import (
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// invalid returns the error for a field whose value is wrong on any host.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// unsupported returns the error for a valid field that this host or this backend does not support.
func unsupported(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrNotImplemented)
}

// classifyFileError adds the field and a class to the error of a file operation. The class is
// errdefs.ErrResourceExhausted if the node lacks a resource, and errdefs.ErrInvalidArgument otherwise. An error from a
// failing disk (EIO) gets no class.
func classifyFileError(field string, err error) error {
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

// checkText rejects a NUL byte, because the kernel would cut the string off at that byte.
func checkText(field, s string) error {
	if strings.ContainsRune(s, 0) {
		return invalid(field, "%q contains a NUL byte", s)
	}
	return nil
}
