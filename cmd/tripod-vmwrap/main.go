// Command tripod-vmwrap is the <emulator> of libvirt domains that Tripod defines: it fetches the machine's descriptors from
// the daemon, adds the network to QEMU's arguments, and becomes QEMU (internal/sandbox/vm/vmwrap). It is not called by hand.
package main

import (
	"context"
	"fmt"
	"os"
	"syscall"

	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
)

func main() {
	emulator, argv, env, err := vmwrap.Prepare(context.Background(), os.Args, os.Environ())
	if err == nil {
		// What QEMU inherits is what libvirt meant for it, and the descriptors of the grant; everything else of this process
		// is closed on exec.
		err = syscall.Exec(emulator, argv, env) //nolint:forbidigo // libvirt knows the emulator by the PID that it started
		err = fmt.Errorf("execute %s: %w", emulator, err)
	}
	// libvirt shows what its emulator says last as the reason why the domain did not start.
	fmt.Fprintf(os.Stderr, "%s: %v\n", vmwrap.ProgramName, err)
	os.Exit(1)
}
