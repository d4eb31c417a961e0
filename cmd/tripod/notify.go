package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
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
}

// newNotifier reads systemd's variables and removes them from the environment, because runc would pass NOTIFY_SOCKET to
// containers.
func newNotifier(log *slog.Logger) *notifier {
	n := &notifier{log: log, socket: os.Getenv("NOTIFY_SOCKET")}
	var err error
	if n.interval, err = daemon.SdWatchdogEnabled(true); err != nil {
		log.Warn("the watchdog is misconfigured", "err", err)
	}
	_ = os.Unsetenv("NOTIFY_SOCKET")
	return n
}

func (n *notifier) send(state string) {
	if n.socket == "" {
		return
	}
	c, err := net.Dial("unixgram", n.socket)
	if err == nil {
		_, err = c.Write([]byte(state))
		_ = c.Close()
	}
	if err != nil {
		n.log.Warn("cannot notify systemd", "err", err)
	}
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
	server := &http.Server{Handler: guard.Handler(log, "debug server", mux), BaseContext: func(net.Listener) context.Context { return ctx }, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Warn("debug server failed", "err", err)
		}
	}()
	return func() { _ = server.Close() }, nil
}
