package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/internal/idle"
)

// drainTime is how long calls in progress may continue after the daemon has been asked to stop. It must be below
// TimeoutStopSec of the systemd unit.
const drainTime = 20 * time.Second

// lastWords is the time that event streams have, after all other calls have ended, to report that the daemon is
// stopping. Clients that do not read miss the report.
const lastWords = time.Second

func daemonCommand() *cobra.Command {
	var s settings
	c := &cobra.Command{
		Use: "daemon", Short: "Run the node", Args: cobra.NoArgs,
		Long: `Run the node in the foreground. SIGTERM and SIGINT end it once the calls in progress are done, a second signal
immediately. Pods keep running, and the next start finds them again.`,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := s.load()
			if err != nil {
				return err
			}
			if err := checkTestBuild(); err != nil {
				return err
			}
			// Not 077: files that containers see (roots of file systems, resolv.conf, log files) must get the mode that their
			// creator chose. Private files are below directories of mode 0700 (privateDir).
			unix.Umask(0o022)
			log := newLogger(cfg, c.ErrOrStderr())
			return runDaemon(c.Context(), cfg, log)
		},
	}
	s.flags(c)
	return c
}

// runDaemon runs the daemon until it is stopped.
func runDaemon(ctx context.Context, c *config.Config, log *slog.Logger) error {
	started := time.Now()
	if c.Debug.Socket != "" {
		runtime.MemProfileRate = profiledBytes
	}
	systemd := newNotifier(log)
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	release, err := holdDirectories(ctx, c, log)
	if err != nil {
		return err
	}
	defer release()
	files, err := fileLimit()
	if err != nil {
		return err
	}
	p, err := openParts(ctx, c, log)
	if err != nil && ctx.Err() != nil {
		log.Info("stopped before the node was ready", "err", err)
		return nil
	}
	if err != nil {
		return err
	}
	listener, err := listenKept(ctx, c.GRPC.Socket, systemd, log)
	if err != nil {
		return errors.Join(err, p.close())
	}
	closeDebug, err := serveDebug(ctx, c.Debug.Socket, log)
	if err != nil {
		return errors.Join(err, listener.Close(), p.close())
	}
	defer closeDebug()
	log.Info("tripod is ready", "version", version, "socket", c.GRPC.Socket, "pods", len(p.node.Pods()),
		"files", files, "took", time.Since(started).Round(time.Millisecond))
	idle.Watch(ctx, log)
	err = serve(ctx, stop, p, listener, systemd, log)
	log.Info("tripod has stopped; its pods keep running")
	return err
}

// holdDirectories secures the state directories and locks them for this process.
func holdDirectories(ctx context.Context, c *config.Config, log *slog.Logger) (release func(), err error) {
	var locks []*os.File
	release = func() {
		for _, l := range locks {
			_ = l.Close()
		}
	}
	for _, dir := range []string{c.Root, c.State} {
		mode := rootMode
		if dir == c.State {
			mode = stateMode
		}
		err := privateDir(dir, mode, log)
		if err == nil && dir == c.State { // no other daemon is here: the root directory is locked
			err = mountRunDir(dir, log)
		}
		var lock *os.File
		if err == nil {
			lock, err = lockDir(ctx, dir)
		}
		if err != nil {
			release()
			return nil, err
		}
		locks = append(locks, lock)
	}
	if err := refuseLostRecord(recordFile(c), podTraces(c)...); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

func holdDirectory(ctx context.Context, dir string, log *slog.Logger) (*os.File, error) {
	if err := privateDir(dir, rootMode, log); err != nil {
		return nil, err
	}
	return lockDir(ctx, dir)
}

// serve answers calls until the first signal, which ends ctx.
func serve(ctx context.Context, stop context.CancelFunc, p *parts, listener net.Listener, systemd *notifier, log *slog.Logger) error {
	// Event streams never end by themselves. End them, so that the server can drain.
	draining, drain := context.WithCancel(context.Background())
	defer drain()
	var calls calls
	server := grpc.NewServer(slices.Concat(p.serverOptions(), cri.ServerOptions(), []grpc.ServerOption{
		grpc.ChainStreamInterceptor(endWith(draining)), grpc.ChainUnaryInterceptor(calls.count),
	}, p.server.Interceptors())...)
	p.server.Register(server)

	failed := make(chan error, 2)
	go func() { failed <- server.Serve(listener) }()
	go func() { failed <- p.streams.Serve(draining) }()
	systemd.ready(fmt.Sprintf("%d pods", len(p.node.Pods())))
	go systemd.watchdog(ctx, probe(listener.Addr().String()))

	var err error
	select {
	case <-ctx.Done():
		log.Info("stopping; waiting for calls in progress", "limit", drainTime)
	case err = <-failed:
		log.Error("serving failed", "err", err)
	}
	systemd.stopping()
	stop() // from now on a signal kills the process
	drain()
	finish(server, &calls, drainTime, log)
	return errors.Join(err, p.close())
}

// calls tracks unary calls in progress. Each call holds the lock for reading.
type calls struct{ sync.RWMutex }

func (c *calls) count(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	c.RLock()
	defer c.RUnlock()
	return handler(ctx, req)
}

// ended returns a channel that is closed once all calls in progress have ended.
func (c *calls) ended() <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.Lock()
		defer c.Unlock()
	}()
	return ended
}

// finish drains the server for at most the given time. After the last unary call it waits for streams no longer than
// lastWords, because a stream whose client does not read never drains.
func finish(server *grpc.Server, calls *calls, limit time.Duration, log *slog.Logger) {
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		server.GracefulStop()
	}()
	select {
	case <-drained:
		return
	case <-calls.ended():
	case <-time.After(limit):
		log.Warn("cutting off calls in progress; the next start recovers their state")
		server.Stop()
	}
	select {
	case <-drained:
	case <-time.After(lastWords):
		server.Stop()
	}
	<-drained
}

// endWith ends streaming calls when ctx ends.
func endWith(ctx context.Context) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		c, cancel := context.WithCancel(stream.Context())
		defer cancel()
		defer context.AfterFunc(ctx, cancel)()
		err := handler(srv, &streamWithContext{stream, c})
		if ctx.Err() != nil && stream.Context().Err() == nil {
			return status.Error(codes.Unavailable, "the daemon is stopping")
		}
		return err
	}
}

type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *streamWithContext) Context() context.Context { return s.ctx }
