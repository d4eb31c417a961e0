package oci

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// Tried is what the trial containers of one version of an OCI runtime have shown, on the kernel and with the conmon on which
// it will run.
type Tried struct {
	// Version is the first line of the runtime's --version.
	Version string
	// RecursiveReadOnly means that the runtime supports the mount option "rro".
	RecursiveReadOnly bool
	// Releases means that the runtime's start only sends a byte to the container's init, so that it need not run.
	Releases bool
	// Features are the parts of a specification that the runtime knows.
	Features spec.Runtime
}

// tried returns the known results of a runtime's trial.
func (c Config) tried(version string) (Tried, bool) {
	i := slices.IndexFunc(c.Tried, func(t Tried) bool { return t.Version == version })
	if i < 0 {
		return Tried{}, false
	}
	return c.Tried[i], true
}

// errNoUsers is the reason why a runtime with Config.NoUserNamespaces runs no containers in user namespaces.
var errNoUsers = fmt.Errorf("the backend is configured without user namespaces: %w", errdefs.ErrNotImplemented)
