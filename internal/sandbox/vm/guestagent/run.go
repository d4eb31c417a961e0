package guestagent

import (
	"errors"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// Run runs tripod-agent. It returns only if another agent has opened the port, or if this process may not open the
// port.
func Run(version string) {
	// Survive the end of the terminal or shell that started the agent. Unlike signal.Ignore, signal.Notify does not
	// change how these signals act on the programs that the agent starts.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGPIPE)
	_, _ = unix.Setsid() // fails for a process group leader, which does not need a new session
	_ = os.Chdir("/")
	for {
		port, err := waitPort(wire.PortName)
		if err == nil {
			err = Serve(port, version)
			_ = port.Close()
		}
		os.Stderr.WriteString("tripod-agent: " + err.Error() + "\n")
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			return
		}
	}
}
