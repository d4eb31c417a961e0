// tripod-agent runs in a virtual machine and serves the daemon's exec, port-forward and figures (docs/vm.md). It takes no
// arguments, stays in the foreground and needs nobody to manage it: start it with & from an init script, or as a service.
package main

import (
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
)

// version is set by the linker.
var version = "dev"

func main() {
	guestagent.Run(version)
	os.Exit(1)
}
