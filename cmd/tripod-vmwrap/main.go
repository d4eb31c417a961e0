// Command tripod-vmwrap is the <emulator> of libvirt domains that Tripod defines. It fetches the machine's descriptors
// from the daemon, adds the network to QEMU's arguments, and executes QEMU (internal/sandbox/vm/vmwrap).
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
)

func main() {
	err := vmwrap.Exec(context.Background(), os.Args, os.Environ())
	// Print the error, because libvirt reports the emulator's last output as the reason why the domain did not start.
	fmt.Fprintf(os.Stderr, "%s: %v\n", vmwrap.ProgramName, err)
	os.Exit(1)
}
