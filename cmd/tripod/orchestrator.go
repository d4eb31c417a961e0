package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/signal"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge"
	"github.com/tripod-run/tripod/internal/idle"
)

// orchestratorSettings are the flags that override [orchestrator].
type orchestratorSettings struct {
	file, root, broker, address, logLevel string
	embed                                 bool
}

func orchestratorCommand() *cobra.Command {
	var s orchestratorSettings
	c := &cobra.Command{
		Use: "orchestrator", Short: "Run the orchestrator: it places modules on the runtimes of all nodes, over MQTT", Args: cobra.NoArgs,
		Long: `Run the orchestrator of the edge protocol in the foreground, with the section [orchestrator] of the configuration. Managers
and runtimes register with it, and clients ask it to create modules. It records all of them; GET /api/modules/ and
/api/runtimes/ show the record. SIGTERM and SIGINT end it. Modules keep running, and the next start knows them.`,
		Example: `  tripod orchestrator --broker mqtt://broker.example:1883
  tripod orchestrator --embed-broker`,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := s.load()
			if err != nil {
				return err
			}
			if err := checkTestBuild(); err != nil {
				return err
			}
			return runOrchestrator(c.Context(), cfg, newLogger(cfg, c.ErrOrStderr()))
		},
	}
	f := c.Flags()
	f.StringVar(&s.file, "config", "", "configuration file (default "+config.DefaultPath+", if it exists)")
	f.StringVar(&s.root, "root", "", "override orchestrator.root: directory of the record")
	f.StringVar(&s.broker, "broker", "", "override orchestrator.broker: mqtt://HOST:PORT, mqtts://HOST:PORT or embedded")
	f.BoolVar(&s.embed, "embed-broker", false, "run the broker in this process, with the settings of [broker]; the same as --broker embedded")
	f.StringVar(&s.address, "address", "", "override orchestrator.address: HOST:PORT for REST and metrics")
	f.StringVar(&s.logLevel, "log-level", "", "override log.level: debug, info, warn, error")
	return c
}

// load reads the file, applies the flags and validates the result.
func (s *orchestratorSettings) load() (*config.Config, error) {
	if s.embed && s.broker != "" && s.broker != config.EmbeddedBroker {
		return nil, fmt.Errorf("--embed-broker and --broker %s conflict: choose one: %w", s.broker, errdefs.ErrInvalidArgument)
	}
	if s.embed {
		s.broker = config.EmbeddedBroker
	}
	return loadConfig(s.file, func(c *config.Config) map[*string]string {
		o := &c.Orchestrator
		return map[*string]string{&o.Root: s.root, &o.Broker: s.broker, &o.Address: s.address, &c.Log.Level: s.logLevel}
	})
}

// runOrchestrator runs the orchestrator until a signal, or until ctx ends.
func runOrchestrator(ctx context.Context, c *config.Config, log *slog.Logger) error {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills the process
	systemd := newNotifier(log)
	lock, err := holdDirectory(ctx, c.Orchestrator.Root, log)
	if err != nil {
		return err
	}
	defer lock.Close()
	connections := connlimit.NewGroup(log)
	o, err := edge.OpenOrchestrator(ctx, c, edge.Services{Connections: connections, Limits: limits(c.Connections), Logger: log},
		connectionFigures{connections.Stats})
	if err != nil {
		return err
	}
	log.Info("the orchestrator is ready", "version", version, "broker", o.BrokerURL, "realm", c.Orchestrator.Realm, "address",
		c.Orchestrator.Address)
	systemd.ready("broker " + o.BrokerURL)
	idle.Watch(ctx, log)
	err = o.Serve(ctx)
	systemd.stopping()
	err = errors.Join(err, o.Close())
	log.Info("the orchestrator has stopped; modules keep running")
	return err
}
