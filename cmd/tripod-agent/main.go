// tripod-agent runs in a virtual machine and serves the daemon's exec, port-forward and figures (docs/vm.md). It takes no
// arguments, stays in the foreground and needs nobody to manage it: start it with & from an init script, or as a service.
package main

import (
	"errors"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
)

// version is set by the linker.
var version = "dev"

// portName is the port's name in the machine's definition (internal/sandbox/vm/internal/machine.AgentPort).
const portName = "dev.tripod.agent.0"

func main() {
	// A terminal or a shell from which it was started may end; programs that it starts find the signals as usual.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGPIPE)
	_, _ = unix.Setsid() // fails for the leader of a process group, to whom it does not matter
	_ = os.Chdir("/")
	for {
		port, err := guestagent.WaitPort(portName)
		if err == nil {
			err = guestagent.Serve(port, version)
			_ = port.Close()
		}
		os.Stderr.WriteString("tripod-agent: " + err.Error() + "\n")
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			os.Exit(1) // another one has the port, or we may not
		}
	}
}
