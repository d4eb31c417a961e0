package spec

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// invalid is the refusal of a field whose value cannot be right.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// unsupported is the refusal of a field that is right but that this host, or this backend, cannot honour.
func unsupported(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrNotImplemented)
}

// checkText refuses text that would be cut short on its way to the kernel, which ends strings at a NUL.
func checkText(field, s string) error {
	if strings.ContainsRune(s, 0) {
		return invalid(field, "%q contains a NUL byte", s)
	}
	return nil
}
