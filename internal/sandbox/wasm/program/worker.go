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

// Sizes of a worker by default: how many instances have room in the pool, how many more may live outside of it, and the
// largest linear memory.
const (
	defaultInstances = 1024
	overflow         = 4096
	defaultMaxMemory = 4 << 30
	// threadReserve is for threads that no guest blocks.
	threadReserve = 1000
	// gcPercent spares the small heap of a worker half of its collections; a tenth of the CPU time of a call.
	gcPercent = 200
)

// runWorker serves until SIGTERM.
func runWorker(config workerapi.WorkerConfig, version string) error {
	// A crash of the engine prints one stack, not those of all requests.
	debug.SetTraceback("single")
	debug.SetGCPercent(gcPercent)
	// A guest that waits for a message or for input holds a thread.
	debug.SetMaxThreads(cmp.Or(config.Instances, defaultInstances) + overflow + threadReserve)
	// The worker must survive the daemon: neither a closed log pipe nor the end of a terminal may end it.
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP, syscall.SIGINT)
	logger, err := newLogger(config)
	if err != nil {
		return err
	}
	controlSocket, dataSocket, err := inherited()
	if err != nil {
		return err
	}
	ready := os.NewFile(workerapi.FDReady, "ready")
	pid, err := outerPID()
	if err != nil {
		return err
	}
	if err := giveUp(config, logger); err != nil {
		return err
	}
	e, err := engine.New(engine.Config{ // after giveUp: the engine probes what its user may do
		Instances: cmp.Or(config.Instances, defaultInstances), Overflow: overflow,
		MaxMemory: cmp.Or(config.MaxMemory, defaultMaxMemory), Logger: logger,
	})
	if err != nil {
		return err
	}
	if err := lockdown.Restrict(); err != nil {
		return err
	}
	return serve(config, version, e, logger, controlSocket, dataSocket, ready, pid)
}

func newLogger(config workerapi.WorkerConfig) (*slog.Logger, error) {
	level := slog.LevelInfo
	if config.LogLevel != "" {
		if err := level.UnmarshalText([]byte(config.LogLevel)); err != nil {
			return nil, fmt.Errorf("logLevel: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	logger := slog.New(slog.NewJSONHandler(&boundedLog{file: os.Stderr, most: maxLog}, &slog.HandlerOptions{Level: level})).With("worker", config.Name)
	slog.SetDefault(logger)
	return logger, nil
}

// inherited are the listening sockets.
func inherited() (controlSocket, data *net.UnixListener, err error) {
	listeners := make([]*net.UnixListener, 2)
	for i, fd := range []uintptr{workerapi.FDControl, workerapi.FDData} {
		file := os.NewFile(fd, "socket")
		l, err := net.FileListener(file)
		file.Close()
		listener, ok := l.(*net.UnixListener)
		if err != nil || !ok {
			return nil, nil, fmt.Errorf("descriptor %d is not a listening unix socket: %v: %w", fd, err, errdefs.ErrInvalidArgument)
		}
		listener.SetUnlinkOnClose(false) // the path is the daemon's
		listeners[i] = listener
	}
	return listeners[0], listeners[1], nil
}

// outerPID is the process ID in the daemon's namespace. It works only while /proc is still the daemon's.
func outerPID() (int, error) {
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(self)
}

// giveUp gives up the node's file systems and root.
func giveUp(config workerapi.WorkerConfig, logger *slog.Logger) error {
	if config.Isolated {
		if err := lockdown.Isolate(); err != nil {
			return err
		}
	}
	// Threads leave SCHED_IDLE again only with this limit (sched(7)); 20 is nice 0.
	if err := unix.Setrlimit(unix.RLIMIT_NICE, &unix.Rlimit{Cur: 20, Max: 20}); err != nil {
		logger.Debug("RLIMIT_NICE cannot be set: the engine finds another way to hold back guests that compute for long", "err", err)
	}
	if config.UID == 0 {
		return nil
	}
	return lockdown.Drop(config.UID, config.GID)
}

func serve(config workerapi.WorkerConfig, version string, e *engine.Engine, logger *slog.Logger, controlSocket, data *net.UnixListener, ready io.WriteCloser, pid int) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var server *workerapi.Server
	w := worker.New(worker.Config{
		Name: config.Name, Program: version, Pid: pid, Engine: e, Logger: logger, LogSizeMax: config.LogSizeMax, Spans: config.Spans,
		Connections: config.Connections,
		Publish:     func(e workerapi.Event) { server.Publish(e) }, // there are no pods before there is a server
	})
	server = workerapi.NewServer(controlSocket, w, logger)
	ended := make(chan error, 2)
	go func() { ended <- server.Serve() }()
	go func() { ended <- w.ServeData(ctx, data) }()
	if _, err := io.WriteString(ready, "ready\n"); err != nil {
		logger.Warn("the daemon no longer waits for the worker", "err", err)
	}
	ready.Close()
	logger.Info("the worker serves", "version", version, "pid", pid, "uid", os.Getuid(), "engine", engine.Fingerprint())
	var err error
	select {
	case <-ctx.Done():
		logger.Info("the worker ends, and its pods with it")
	case err = <-ended:
	}
	w.Close() // reports each pod's end to the daemon
	return errors.Join(err, server.Close())
}
