package oci

import (
	"errors"
	"os/exec"
	"slices"
)

// Config says where the OCI runtime and conmon are, and where they keep their files.
type Config struct {
	// Runtime is the OCI runtime: "auto" (crun if it works on this host, otherwise runc), "crun", "runc" or a path.
	Runtime string
	// Conmon is the path of conmon. If it is empty, conmon is looked up in PATH.
	Conmon string
	// Bundles is the directory that contains <pod>/<container>, the bundles.
	Bundles string
	// RunDir is the directory of trial containers, StateDir that of the runtime's state, and ExitDir that of exit files.
	RunDir, StateDir, ExitDir string
	// LogSizeMax is the size limit of a container's log file in bytes; 0 means no limit.
	LogSizeMax int64
	// Tried are the results of trials that need not be repeated. If there are any, conmon is not run to check it.
	Tried []Tried
	// NoUserNamespaces leaves out the trial of user namespaces.
	NoUserNamespaces bool
}

// Missing says which program is not in PATH; "" if none is, or if the configuration names a program: somebody then wants
// this program, so the error is left to the search for it.
func (c Config) Missing() string {
	found := func(name string) bool {
		_, err := exec.LookPath(name)
		return !errors.Is(err, exec.ErrNotFound)
	}
	switch {
	case c.Runtime != "auto" || c.Conmon != "":
		return ""
	case !slices.ContainsFunc(c.runtimes(), found):
		return "no OCI runtime is installed: neither crun nor runc is in PATH (Debian: apt-get install crun)"
	case !found("conmon"):
		return "conmon is not in PATH (Debian: apt-get install conmon)"
	}
	return ""
}
