// tripod-agent runs in a virtual machine and serves the daemon's exec, port-forward and statistics requests
// (docs/vm.md). It takes no arguments and stays in the foreground. Start it with & from an init script, or as a
// service.
package main

import (
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
)

var version = "dev" // set by the linker

func main() {
	guestagent.Run(version, nil)
	os.Exit(1)
}
