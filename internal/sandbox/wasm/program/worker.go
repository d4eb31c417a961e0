package program

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/lockdown"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/worker"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const (
	defaultInstances = 1024    // instances in the engine's pool
	overflow         = 4096    // instances beyond the pool
	defaultMaxMemory = 4 << 30 // bytes of a linear memory
	threadReserve    = 1000    // threads besides those that guests block
	// gcPercent halves the number of garbage collections. Because a worker's heap is small, that saves a tenth of the
	// CPU time of a call.
	gcPercent = 200
	// unasked is enough for those that start at a time on a node in use. Each has 10 MB, if it is a Go server.
	unasked = 4
)

// runWorker runs a worker until SIGTERM.
func runWorker(config workerapi.WorkerConfig, version string) error {
	// A crash prints the stack of only one goroutine.
	debug.SetTraceback("single")
	debug.SetGCPercent(gcPercent)
	// A guest that waits for a message or for input occupies a thread, so each instance can need one: those in the pool, and
	// as many again besides the overflow.
	debug.SetMaxThreads(2*cmp.Or(config.Instances, defaultInstances) + overflow + threadReserve)
	// The worker must survive the daemon, so a closed log pipe or terminal must not end the worker.
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP, syscall.SIGINT)
	logger, err := newLogger(config.Name, config.LogLevel)
	if err != nil {
		return err
	}
	controlSocket, dataSocket, err := inheritedSockets()
	if err != nil {
		return err
	}
	ready := os.NewFile(workerapi.FDReady, "ready")
	pid, err := outerPID()
	if err != nil {
		return err
	}
	if err := dropPrivileges(config, logger); err != nil {
		return err
	}
	e, err := engine.New(engine.Config{ // after dropPrivileges, because the engine probes its user's permissions
		Instances: cmp.Or(config.Instances, defaultInstances), Overflow: overflow,
		MaxMemory: cmp.Or(config.MaxMemory, defaultMaxMemory), Logger: logger,
	})
	if err != nil {
		return err
	}
	if err := lockdown.Restrict(lockdown.WorkerPolicy()); err != nil {
		return err
	}
	return serve(config, version, e, logger, controlSocket, dataSocket, ready, pid)
}

// newLogger makes the logger of a process with a name.
func newLogger(name, levelName string) (*slog.Logger, error) {
	level := slog.LevelInfo
	if levelName != "" {
		if err := level.UnmarshalText([]byte(levelName)); err != nil {
			return nil, fmt.Errorf("logLevel: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	logger := slog.New(slog.NewJSONHandler(&boundedLog{file: os.Stderr, limit: maxLog}, &slog.HandlerOptions{Level: level})).With("worker",
		name)
	slog.SetDefault(logger)
	return logger, nil
}

// inheritedSockets returns the listeners that the daemon passed.
func inheritedSockets() (controlSocket, data *net.UnixListener, err error) {
	listeners := make([]*net.UnixListener, 2)
	for i, fd := range []uintptr{workerapi.FDControl, workerapi.FDData} {
		if listeners[i], err = inheritedSocket(fd); err != nil {
			return nil, nil, err
		}
	}
	return listeners[0], listeners[1], nil
}

func inheritedSocket(fd uintptr) (*net.UnixListener, error) {
	file := os.NewFile(fd, "socket")
	l, err := net.FileListener(file)
	file.Close()
	listener, ok := l.(*net.UnixListener)
	if err != nil || !ok {
		return nil, fmt.Errorf("descriptor %d is not a listening unix socket: %v: %w", fd, err, errdefs.ErrInvalidArgument)
	}
	listener.SetUnlinkOnClose(false) // the daemon owns the path
	return listener, nil
}

// outerPID returns the process ID in the daemon's PID namespace. Call it before Isolate, which replaces the daemon's
// /proc.
func outerPID() (int, error) {
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(self)
}

// dropPrivileges takes from the worker its access to the node's file systems and its root privileges.
func dropPrivileges(config workerapi.WorkerConfig, logger *slog.Logger) error {
	if config.Isolated {
		if err := lockdown.Isolate(); err != nil {
			return err
		}
	}
	// A thread can leave SCHED_IDLE only with this limit (sched(7)). The value 20 means nice 0.
	if err := unix.Setrlimit(unix.RLIMIT_NICE, &unix.Rlimit{Cur: 20, Max: 20}); err != nil {
		logger.Debug("set RLIMIT_NICE failed; the engine throttles long-running guests in another way", "err", err)
	}
	if config.UID == 0 {
		return nil
	}
	return lockdown.Drop(config.UID, config.GID)
}

func serve(config workerapi.WorkerConfig, version string, e *engine.Engine, logger *slog.Logger, controlSocket, data *net.UnixListener,
	ready io.WriteCloser, pid int) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var server *workerapi.Server
	w := worker.New(worker.Config{
		Name: config.Name, Program: version, Pid: pid, Engine: e, Logger: logger, LogSizeMax: config.LogSizeMax, Spans: config.Spans,
		Connections: config.Connections, Unasked: unasked,
		Publish: func(e workerapi.Event) { server.Publish(e) }, // server is set before any pod is started
	})
	server = workerapi.NewServer(controlSocket, w, logger)
	ended := make(chan error, 2)
	go func() { ended <- server.Serve() }()
	go func() { ended <- w.ServeData(ctx, data) }()
	if _, err := io.WriteString(ready, "ready\n"); err != nil {
		logger.Warn("report to the daemon failed", "err", err)
	}
	ready.Close()
	logger.Info("worker started", "version", version, "pid", pid, "uid", os.Getuid(), "engine", engine.Fingerprint())
	var err error
	select {
	case <-ctx.Done():
		logger.Info("worker shutting down")
	case err = <-ended:
	}
	w.Close() // before the server, which reports each pod's exit to the daemon
	return errors.Join(err, server.Close())
}
