package linux

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// Tried is what the trial containers of one version of an OCI runtime have shown, on the kernel and with the conmon on which
// the backend will run.
type Tried struct {
	// Version is the first line of the runtime's --version.
	Version string
	// RecursiveReadOnly and Releases have the meaning of those of ociRuntime.
	RecursiveReadOnly, Releases bool
	// Features are the parts of a specification that the runtime knows.
	Features spec.Runtime
}

// DebianCrun is what the trial of Debian 12's crun shows.
var DebianCrun = Tried{Version: "crun version 1.8.1", RecursiveReadOnly: true, Releases: true}

// tried returns the known results of a runtime's trial.
func (c Config) tried(version string) (Tried, bool) {
	i := slices.IndexFunc(c.Tried, func(t Tried) bool { return t.Version == version })
	if i < 0 {
		return Tried{}, false
	}
	return c.Tried[i], true
}

// errNoUsers is the reason why a backend with Config.NoUserNamespaces runs no pods in user namespaces.
var errNoUsers = fmt.Errorf("the backend is configured without user namespaces: %w", errdefs.ErrNotImplemented)
