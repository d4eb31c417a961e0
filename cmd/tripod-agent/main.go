// tripod-agent runs in a virtual machine and serves the daemon's exec, port-forward and statistics requests
// (docs/vm.md). It takes no arguments and stays in the foreground. Start it with & from an init script, or as a
// service. The daemon runs "tripod-agent renew" in a guest that continues from a template.
package main

import (
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
)

var version = "dev" // set by the linker

func main() {
	if len(os.Args) > 1 && os.Args[1] == "renew" {
		if err := guestagent.Renew(os.Args[2:], os.Stdin); err != nil {
			os.Stderr.WriteString("tripod-agent: " + err.Error() + "\n")
			os.Exit(1)
		}
		return
	}
	guestagent.Run(version, nil)
	os.Exit(1)
}
