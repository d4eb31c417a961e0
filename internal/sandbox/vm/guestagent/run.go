package guestagent

import (
	"errors"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// Run runs tripod-agent. It returns only if another agent has opened the port, or if this process may not open the
// port. The service may be nil.
func Run(version string, service Service) {
	// Survive the end of the terminal or shell that started the agent. Unlike signal.Ignore, signal.Notify does not
	// change how these signals act on the programs that the agent starts.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGPIPE)
	_, _ = unix.Setsid() // fails for a process group leader, which does not need a new session
	_ = os.Chdir("/")
	for _, name := range wire.SessionPortNames {
		go func() {
			if appears(name, wire.PortName) {
				runPort(name, version, service)
			}
		}()
	}
	runPort(wire.PortName, version, service)
}

// appears waits for a port, and reports whether it appears. A host makes all ports together, so the port is missing if
// it does not appear soon after the other port.
func appears(name, other string) bool {
	for late := 0; late < lateMax; {
		if portPath(name) != "" {
			return true
		}
		if portPath(other) != "" {
			late++
		}
		time.Sleep(portPoll) // pacing: devtmpfs and sysfs have no inotify events
	}
	return false
}

// runPort serves a port until the port cannot be used.
func runPort(name, version string, service Service) {
	for {
		port, err := waitPort(name)
		if err == nil {
			err = Serve(port, version, service)
			_ = port.Close()
		}
		os.Stderr.WriteString("tripod-agent: " + err.Error() + "\n")
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			return
		}
	}
}
