package main

import (
	"context"
	"log/slog"
	"os/signal"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/wasm"
	"github.com/tripod-run/tripod/internal/stream"
)

// openStreams issues the URLs of exec, attach and port-forward sessions. A carrier serves the sessions.
func (p *parts) openStreams(ctx context.Context, c *config.Config, log *slog.Logger) (err error) {
	limits := limits(c.Connections)
	limits.Files = stream.FilesPerSession
	p.streams, err = stream.NewDispatcher(ctx, stream.DispatcherConfig{
		Address: c.GRPC.StreamingAddress, Dir: filepath.Join(c.State, "sessions"),
		Command:      []string{"sessions", "--log-level", c.Log.Level, "--log-format", c.Log.Format},
		CgroupDriver: cgroupDriver(c), CgroupParent: c.Linux.CgroupParent,
		Planner: p.node, Runtime: cri.StreamRuntime(p.node), Connections: limits, Logger: log.With("part", "stream"),
	})
	if err != nil {
		return err
	}
	p.opened(p.streams.Close)
	return nil
}

// connectionStats returns the figures of the node's addresses, those of the session carrier included.
func (p *parts) connectionStats() []connlimit.Stats {
	all := p.connections.Stats()
	if s, ok := p.streams.Stats(context.Background()); ok {
		all = append(all, s)
	}
	return all
}

// sessionsCommand is the program of session carriers. Dispatchers start it.
func sessionsCommand() *cobra.Command {
	var c config.Config
	command := &cobra.Command{
		Use: "sessions CONFIG", Hidden: true, Short: "Carry exec, attach and port-forward sessions (started by the daemon)",
		Args: cobra.ExactArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			log := newLogger(&c, command.ErrOrStderr()).With("part", "sessions")
			ctx, stop := signal.NotifyContext(command.Context(), unix.SIGTERM, unix.SIGINT)
			defer stop()
			linux := linux.NewSessions(log)
			defer linux.Close()
			return stream.Carry(ctx, args[0], stream.Carriage{
				Servers: map[string]sandbox.SessionServer{"linux": linux, "vm": vm.NewSessions(log), "wasm": wasm.Sessions{}},
				Dial:    network.Dial, Logger: log,
			})
		},
	}
	command.Flags().StringVar(&c.Log.Level, "log-level", "info", "debug, info, warn, error")
	command.Flags().StringVar(&c.Log.Format, "log-format", "text", "text or json")
	return command
}
