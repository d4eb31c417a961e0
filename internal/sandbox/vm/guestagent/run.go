package guestagent

import (
	"errors"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// Run is the life of tripod-agent. It returns when another agent has the port, or when this one may not open it.
func Run(version string) {
	// The terminal or shell that started the agent may end. Notify, unlike Ignore, leaves the default to programs that the
	// agent starts.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGPIPE)
	_, _ = unix.Setsid() // fails for the leader of a process group, which needs no new session
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
