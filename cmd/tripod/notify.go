package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/internal/guard"
)

// notifier reports the daemon's state to systemd (sd_notify(3)). Without systemd it does nothing.
type notifier struct {
	log      *slog.Logger
	socket   string
	interval time.Duration // between watchdog notifications that systemd expects; 0 means that systemd expects none
	kept     []*os.File    // what systemd passed to this process, until take
}

// newNotifier reads systemd's variables and removes them from the environment, because runc would pass NOTIFY_SOCKET to
// containers.
func newNotifier(log *slog.Logger) *notifier {
	n := &notifier{log: log, socket: os.Getenv("NOTIFY_SOCKET"), kept: activation.Files(true)}
	var err error
	if n.interval, err = daemon.SdWatchdogEnabled(true); err != nil {
		log.Warn("the watchdog is misconfigured", "err", err)
	}
	_ = os.Unsetenv("NOTIFY_SOCKET")
	return n
}

func (n *notifier) send(state string, files ...int) {
	if n.socket == "" {
		return
	}
	// Not by package net, which passes no files over a connected datagram socket.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Sendmsg(fd, []byte(state), unix.UnixRights(files...), &unix.SockaddrUnix{Name: n.socket}, 0), unix.Close(fd))
	}
	if err != nil {
		n.log.Warn("cannot notify systemd", "err", err)
	}
}

// store lets systemd keep a descriptor for the next daemon (FileDescriptorStoreMax in systemd.service(5)). It returns
// false without systemd. If systemd refuses, only systemd's log says so.
func (n *notifier) store(c syscall.Conn) (bool, error) {
	raw, err := c.SyscallConn()
	if err != nil || n.socket == "" {
		return false, err
	}
	// Not by a copy from File, whose Fd would make the original blocking.
	return true, raw.Control(func(fd uintptr) { n.send("FDSTORE=1\nFDNAME=tripod", int(fd)) })
}

// take returns the kept file for which want is true, or nil. Systemd drops the others.
func (n *notifier) take(want func(*os.File) bool) (taken *os.File) {
	for _, f := range n.kept {
		if taken == nil && want(f) {
			taken = f
			continue
		}
		n.send("FDSTOREREMOVE=1\nFDNAME=" + f.Name())
		_ = f.Close()
	}
	n.kept = nil
	return taken
}

func (n *notifier) ready(status string) { n.send(daemon.SdNotifyReady + "\nSTATUS=" + status) }

func (n *notifier) stopping() { n.send(daemon.SdNotifyStopping) }

// watchdog calls probe twice in each watchdog interval, and notifies systemd whenever probe succeeds. If the
// notifications stop, systemd restarts the daemon.
func (n *notifier) watchdog(ctx context.Context, probe func(context.Context) error) {
	if n.interval <= 0 {
		return
	}
	tick := time.NewTicker(n.interval / 2)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := n.limited(ctx, probe); err == nil {
				n.send(daemon.SdNotifyWatchdog)
			} else if ctx.Err() == nil {
				n.log.Error("no answer to the daemon's own probe; not notifying the watchdog", "err", err)
			}
		}
	}
}

func (n *notifier) limited(ctx context.Context, probe func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, n.interval/2)
	defer cancel()
	return probe(ctx)
}

// probe returns a function that lists the node's pods through the daemon's socket, like a kubelet.
func probe(socket string) func(context.Context) error {
	return func(ctx context.Context) error {
		c, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(cri.MaxMessageSize)))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = runtimeapi.NewRuntimeServiceClient(c).ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		return err
	}
}

// serveDebug serves Go profiles on a private socket, if configured.
func serveDebug(ctx context.Context, socket string, log *slog.Logger) (closeAll func(), err error) {
	if socket == "" {
		return func() {}, nil
	}
	listener, err := listenPrivate(ctx, socket, log)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	server := &http.Server{Handler: guard.Handler(log, "debug server", mux), BaseContext: func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 10 * time.Second}
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Warn("debug server failed", "err", err)
		}
	}()
	return func() { _ = server.Close() }, nil
}
