package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
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
)

// drainTime is how long calls under way may take to finish once the daemon has been told to stop. It lies below
// systemd's TimeoutStopSec of the unit.
const drainTime = 20 * time.Second

// lastWords is how long event streams may take to tell their listeners that the daemon stops, once nothing else is under
// way. One who does not read is not told.
const lastWords = time.Second

func daemonCommand() *cobra.Command {
	var s settings
	c := &cobra.Command{
		Use: "daemon", Short: "Run the node", Args: cobra.NoArgs,
		Long: `Run the node in the foreground. SIGTERM and SIGINT end it once the calls under way are done, a second signal
at once; pods keep running either way and are found again at the next start.`,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := s.load()
			if err != nil {
				return err
			}
			if err := checkTestBuild(); err != nil {
				return err
			}
			// Not 077: what containers see (the roots of their file systems, resolv.conf, log files) must be as open as
			// its maker says. What is private lies below directories of mode 0700, see privateDir.
			unix.Umask(0o022)
			log := newLogger(cfg, c.ErrOrStderr())
			return runDaemon(c.Context(), cfg, log)
		},
	}
	s.flags(c)
	return c
}

// runDaemon is the life of the daemon.
func runDaemon(ctx context.Context, c *config.Config, log *slog.Logger) error {
	started := time.Now()
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
		log.Info("told to stop before the node was ready", "err", err)
		return nil
	}
	if err != nil {
		return err
	}
	listener, err := listenPrivate(ctx, c.GRPC.Socket, log)
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
	err = serve(ctx, stop, p, listener, systemd, log)
	log.Info("tripod has stopped; its pods run on")
	return err
}

// holdDirectories makes the state directories safe and takes them for this process.
func holdDirectories(ctx context.Context, c *config.Config, log *slog.Logger) (release func(), err error) {
	var locks []*os.File
	release = func() {
		for _, l := range locks {
			_ = l.Close()
		}
	}
	for _, dir := range []string{c.Root, c.State} {
		err := privateDir(dir, log)
		if err == nil && dir == c.State { // no other daemon does the same: it would hold the root directory
			err = partDir(dir, log)
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
	if err := privateDir(dir, log); err != nil {
		return nil, err
	}
	return lockDir(ctx, dir)
}

// serve answers calls until ctx ends, which is when the first signal comes.
func serve(ctx context.Context, stop context.CancelFunc, p *parts, listener net.Listener, systemd *notifier, log *slog.Logger) error {
	// Event streams have no end of their own; they must not keep the server from draining.
	draining, drain := context.WithCancel(context.Background())
	defer drain()
	var calls calls
	server := grpc.NewServer(slices.Concat(p.serverOptions(), cri.ServerOptions(), []grpc.ServerOption{
		grpc.ChainStreamInterceptor(endWith(draining)), grpc.ChainUnaryInterceptor(calls.count),
	})...)
	p.server.Register(server)

	failed := make(chan error, 2)
	go func() { failed <- server.Serve(listener) }()
	go func() { failed <- p.streams.Serve(draining) }()
	systemd.ready(fmt.Sprintf("%d pods", len(p.node.Pods())))
	go systemd.watchdog(ctx, probe(listener.Addr().String()))

	var err error
	select {
	case <-ctx.Done():
		log.Info("told to stop; letting calls under way finish", "limit", drainTime)
	case err = <-failed:
		log.Error("serving failed", "err", err)
	}
	systemd.stopping()
	stop() // from here on a signal ends the process as signals do
	drain()
	finish(server, &calls, drainTime, log)
	return errors.Join(err, p.close())
}

// calls knows when no unary call is under way: each holds the lock for reading.
type calls struct{ sync.RWMutex }

func (c *calls) count(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	c.RLock()
	defer c.RUnlock()
	return handler(ctx, req)
}

// ended returns a channel that is closed when the calls of this moment have ended.
func (c *calls) ended() <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.Lock()
		defer c.Unlock()
	}()
	return ended
}

// finish drains the server, for limit at most. A stream whose client does not read never drains; nothing waits for those.
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
		log.Warn("calls under way are cut off; the next start finds what they left")
		server.Stop()
	}
	select {
	case <-drained:
	case <-time.After(lastWords):
		server.Stop()
	}
	<-drained
}

// endWith ends streaming calls when ctx does.
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
