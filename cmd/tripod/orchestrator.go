package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/orchestrator"
)

// orchestratorFlush is how long the broker may take to take what the orchestrator has to say when it stops.
const orchestratorFlush = 5 * time.Second

// orchestratorSession is how long the broker keeps what is said to an orchestrator that is away: orders of clients, exits, last
// wills.
const orchestratorSession = 24 * time.Hour

// orchestratorSettings are the flags that stand above [orchestrator].
type orchestratorSettings struct {
	file, root, broker, address, logLevel string
	embed                                 bool
}

func orchestratorCommand() *cobra.Command {
	var s orchestratorSettings
	c := &cobra.Command{
		Use: "orchestrator", Short: "Run the orchestrator: it gives modules to the runtimes of all nodes, over MQTT", Args: cobra.NoArgs,
		Long: `Run the orchestrator of the edge protocol in the foreground, with the section [orchestrator] of the configuration. Managers
and runtimes register with it, clients ask it for modules, and it keeps the record of them, which GET /api/modules/ and
/api/runtimes/ show. SIGTERM and SIGINT end it; modules keep running, and are known at the next start.`,
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
	f.StringVar(&s.file, "config", "", "configuration file (default "+config.DefaultPath+", if it is there)")
	f.StringVar(&s.root, "root", "", "override orchestrator.root: where the record is kept")
	f.StringVar(&s.broker, "broker", "", "override orchestrator.broker: mqtt://HOST:PORT, mqtts://HOST:PORT or embedded")
	f.BoolVar(&s.embed, "embed-broker", false, "run the broker in this process, as [broker] says: --broker embedded")
	f.StringVar(&s.address, "address", "", "override orchestrator.address: REST and metrics")
	f.StringVar(&s.logLevel, "log-level", "", "override log.level: debug, info, warn, error")
	return c
}

// load reads the file, puts the flags over it and validates the whole.
func (s *orchestratorSettings) load() (*config.Config, error) {
	if s.embed && s.broker != "" && s.broker != config.EmbeddedBroker {
		return nil, fmt.Errorf("--embed-broker and --broker %s: choose one: %w", s.broker, errdefs.ErrInvalidArgument)
	}
	c, err := config.Load(s.file)
	if err != nil {
		return nil, err
	}
	if s.embed {
		s.broker = config.EmbeddedBroker
	}
	for _, o := range []struct{ from, to *string }{
		{&s.root, &c.Orchestrator.Root}, {&s.broker, &c.Orchestrator.Broker}, {&s.address, &c.Orchestrator.Address}, {&s.logLevel, &c.Log.Level},
	} {
		if *o.from != "" {
			*o.to = *o.from
		}
	}
	if err := c.Complete(); err != nil {
		return nil, fmt.Errorf("the configuration cannot be used:\n%w", err)
	}
	return c, nil
}

// runOrchestrator is the life of the orchestrator.
func runOrchestrator(ctx context.Context, c *config.Config, log *slog.Logger) (err error) {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process
	systemd := newNotifier(log)
	settings := c.Orchestrator
	lock, err := holdDirectory(ctx, settings.Root, log)
	if err != nil {
		return err
	}
	defer lock.Close()
	oc, endBroker, err := orchestratorConfig(c, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, endBroker()) }()
	var listener net.Listener
	if settings.Address != "" {
		if listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", settings.Address); err != nil {
			return fmt.Errorf("orchestrator.address: %w: %w", err, errdefs.ErrUnavailable)
		}
		defer listener.Close()
	}
	o, err := orchestrator.Open(ctx, oc)
	if err != nil {
		return err
	}
	log.Info("the orchestrator is ready", "version", version, "broker", oc.Broker.URL, "realm", settings.Realm, "address", settings.Address)
	systemd.ready("broker " + oc.Broker.URL)
	if listener == nil {
		<-ctx.Done()
	} else {
		err = o.Serve(ctx, listener)
	}
	systemd.stopping()
	last, cancel := context.WithTimeout(context.Background(), orchestratorFlush)
	defer cancel()
	err = errors.Join(err, o.Close(last))
	log.Info("the orchestrator has stopped; modules run on")
	return err
}

// orchestratorConfig starts the embedded broker, where it is that.
func orchestratorConfig(c *config.Config, log *slog.Logger) (orchestrator.Config, func() error, error) {
	s := c.Orchestrator
	connections := connlimit.NewGroup(log)
	oc := orchestrator.Config{
		Connections: connections.Limiter("rest", limits(c.Connections)), Collectors: []prometheus.Collector{connectionFigures{connections}},
		Path: filepath.Join(s.Root, "record.db"), Topics: edgeTopics(s.Realm, s.Topics), Connect: mqtt.New,
		KeepaliveInterval: time.Duration(s.KeepaliveInterval), KeepaliveMissed: s.KeepaliveMissed, Log: log.With("part", "orchestrator"),
	}
	client, err := mqttConfig(mqttSettings{
		broker: s.Broker, user: s.User, passwordFile: s.PasswordFile, ca: s.CA, cert: s.Certificate, key: s.Key, protocol: s.Protocol,
	}, oc.Log)
	if err != nil {
		return oc, nil, err
	}
	// One realm has one orchestrator, so the name of the session is the realm's.
	client.ClientID, client.SessionExpiry, client.MaxPacket = "tripod-orchestrator-"+s.Realm, orchestratorSession, int64(c.Broker.MaxMessage)
	oc.Broker = client
	if s.Broker != config.EmbeddedBroker {
		return oc, func() error { return nil }, nil
	}
	b, err := newBroker(c, filepath.Join(s.Root, "broker.db"), connections, log.With("part", "broker"))
	if err != nil {
		return oc, nil, err
	}
	oc.Broker.URL = b.URL()
	oc.Collectors = append(oc.Collectors, brokerFigures{b})
	return oc, func() error { return closeBroker(b) }, nil
}
