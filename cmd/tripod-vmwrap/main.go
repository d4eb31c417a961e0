// Command tripod-vmwrap is the <emulator> of libvirt domains that Tripod defines: it fetches the machine's descriptors from
// the daemon, adds the network to QEMU's arguments, and becomes QEMU (internal/sandbox/vm/vmwrap). It is not called by hand.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
)

func main() {
	err := vmwrap.Exec(context.Background(), os.Args, os.Environ())
	// libvirt shows what its emulator says last as the reason why the domain did not start.
	fmt.Fprintf(os.Stderr, "%s: %v\n", vmwrap.ProgramName, err)
	os.Exit(1)
}
