package main

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
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/wasm/control"
	"github.com/tripod-run/tripod/internal/wasm/engine"
	"github.com/tripod-run/tripod/internal/wasm/lockdown"
	"github.com/tripod-run/tripod/internal/wasm/worker"
)

// Sizes of a worker by default: how many instances have room in the pool, how many more may live outside of it, and the
// largest linear memory.
const (
	defaultInstances = 1024
	overflow         = 4096
	defaultMaxMemory = 4 << 30
	// threadReserve is for threads that no guest blocks.
	threadReserve = 1000
)

// runWorker serves until SIGTERM.
func runWorker(config control.WorkerConfig) error {
	// A daemon that goes away must not take the worker along: not by the pipe of a log, not by a terminal's end.
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP, syscall.SIGINT)
	logger, err := newLogger(config)
	if err != nil {
		return err
	}
	controlSocket, dataSocket, err := inherited()
	if err != nil {
		return err
	}
	ready := os.NewFile(control.FDReady, "ready")
	e, err := engine.New(engine.Config{
		Instances: cmp.Or(config.Instances, defaultInstances), Overflow: overflow,
		MaxMemory: cmp.Or(config.MaxMemory, defaultMaxMemory), Logger: logger,
	})
	if err != nil {
		return err
	}
	// A guest that waits for a message or for input holds a thread.
	debug.SetMaxThreads(cmp.Or(config.Instances, defaultInstances) + overflow + threadReserve)
	if err := lock(config); err != nil {
		return err
	}
	return serve(config, e, logger, controlSocket, dataSocket, ready)
}

func newLogger(config control.WorkerConfig) (*slog.Logger, error) {
	level := slog.LevelInfo
	if config.LogLevel != "" {
		if err := level.UnmarshalText([]byte(config.LogLevel)); err != nil {
			return nil, fmt.Errorf("logLevel: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	logger := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("worker", config.Name)
	slog.SetDefault(logger)
	return logger, nil
}

// inherited are the listening sockets.
func inherited() (controlSocket *net.UnixListener, data net.Listener, err error) {
	listeners := make([]*net.UnixListener, 2)
	for i, fd := range []uintptr{control.FDControl, control.FDData} {
		file := os.NewFile(fd, "socket")
		l, err := net.FileListener(file)
		file.Close()
		unix, ok := l.(*net.UnixListener)
		if err != nil || !ok {
			return nil, nil, fmt.Errorf("descriptor %d is not a listening unix socket: %v: %w", fd, err, errdefs.ErrInvalidArgument)
		}
		unix.SetUnlinkOnClose(false) // the path is the daemon's
		listeners[i] = unix
	}
	return listeners[0], listeners[1], nil
}

// lock gives up what the worker does not need.
func lock(config control.WorkerConfig) error {
	if config.Isolated {
		if err := lockdown.Isolate(); err != nil {
			return err
		}
	}
	if config.UID != 0 {
		if err := lockdown.Drop(config.UID, config.GID); err != nil {
			return err
		}
	}
	return lockdown.Restrict()
}

func serve(config control.WorkerConfig, e *engine.Engine, logger *slog.Logger, controlSocket *net.UnixListener, data net.Listener, ready io.WriteCloser) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var server *control.Server
	w := worker.New(worker.Config{
		Name: config.Name, Program: version, Engine: e, Logger: logger, Spans: config.Spans,
		Publish: func(e control.Event) { server.Publish(e) }, // there are no pods before there is a server
	})
	server = control.NewServer(controlSocket, w, logger)
	ended := make(chan error, 2)
	go func() { ended <- server.Serve() }()
	go func() { ended <- w.ServeData(ctx, data) }()
	if _, err := io.WriteString(ready, "ready\n"); err != nil {
		logger.Warn("Nobody waits for the worker to be ready", "err", err)
	}
	ready.Close()
	logger.Info("The worker serves", "version", version, "pid", os.Getpid(), "uid", os.Getuid(), "engine", engine.Fingerprint())
	var err error
	select {
	case <-ctx.Done():
		logger.Info("The worker ends, and its pods with it")
	case err = <-ended:
	}
	w.Close() // the daemon is told of each pod's end
	return errors.Join(err, server.Close())
}
