package program

import (
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dialer"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/lockdown"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// runDialer runs the node's dialer until it has no pods. After SIGTERM it does not wait for further pods.
func runDialer(config workerapi.DialerConfig, version string) error {
	debug.SetTraceback("single")
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP, syscall.SIGINT) // like a worker, it must survive the daemon
	logger, err := newLogger(config.Name, config.LogLevel)
	if err != nil {
		return err
	}
	listener, err := inheritedSocket(workerapi.FDControl)
	if err != nil {
		return err
	}
	if config.Isolated {
		if err := lockdown.Isolate(); err != nil {
			return err
		}
	}
	if err := lockdown.Restrict(lockdown.DialerPolicy()); err != nil {
		return err
	}
	server := dialer.New(listener, config.Idle, logger)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		server.Drain()
	}()
	ready := os.NewFile(workerapi.FDDialerReady, "ready")
	if _, err := io.WriteString(ready, "ready\n"); err != nil {
		logger.Warn("report to the daemon failed", "err", err)
	}
	ready.Close()
	logger.Info("dialer started", "version", version, "uid", os.Getuid())
	defer logger.Info("dialer ended")
	return server.Serve()
}
