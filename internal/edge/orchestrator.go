package edge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/orchestrator"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/health"
)

// orchestratorSession is how long the broker keeps messages for a disconnected orchestrator: clients' requests, exits,
// last wills.
const orchestratorSession = 24 * time.Hour

// Orchestrator is an orchestrator with its REST listener and its embedded broker, if these are configured.
type Orchestrator struct {
	// BrokerURL is the broker's address for a client on this host.
	BrokerURL    string
	orchestrator *orchestrator.Orchestrator
	listener     net.Listener       // nil without REST
	limiter      *connlimit.Limiter // of REST
	broker       broker.Broker      // nil unless it belongs to this orchestrator
}

// OpenOrchestrator opens an orchestrator outside a daemon. Its record is in the directory orchestrator.root, which must
// exist. Its REST interface also serves the metrics of the given collectors.
func OpenOrchestrator(ctx context.Context, c *config.Config, s Services, collectors ...prometheus.Collector) (*Orchestrator, error) {
	settings := c.Orchestrator
	settings.Broker = cmp.Or(settings.Broker, config.DefaultBroker)
	return openOrchestrator(ctx, c, settings, s, collectors...)
}

// openOrchestrator opens an orchestrator with these settings instead of those in c.Orchestrator.
func openOrchestrator(ctx context.Context, c *config.Config, settings config.Orchestrator, s Services,
	collectors ...prometheus.Collector) (_ *Orchestrator, err error) {
	log := s.Logger.With("part", "orchestrator")
	client, b, err := s.connect(c, brokerSettings{
		section: "orchestrator", url: settings.Broker, user: settings.User, passwordFile: settings.PasswordFile, ca: settings.CA,
		cert: settings.Certificate, key: settings.Key, protocol: settings.Protocol, store: filepath.Join(settings.Root, "broker.db"),
	}, log)
	if err != nil {
		return nil, err
	}
	o := &Orchestrator{BrokerURL: client.URL, broker: b, limiter: s.Connections.Limiter("rest", s.Limits)}
	defer func() {
		if err != nil {
			err = errors.Join(err, o.closeServers())
		}
	}()
	if b != nil {
		collectors = append(collectors, brokerFigures{b})
	}
	if settings.Address != "" {
		if o.listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", settings.Address); err != nil {
			return nil, fmt.Errorf("orchestrator.address: %w: %w", err, errdefs.ErrUnavailable)
		}
	}
	// A realm has one orchestrator, so the session is named after the realm.
	client.ClientID, client.SessionExpiry, client.MaxPacket = "tripod-orchestrator-"+settings.Realm, orchestratorSession,
		int64(c.Broker.MaxMessage)
	o.orchestrator, err = orchestrator.Open(ctx, orchestrator.Config{
		Path: filepath.Join(settings.Root, "record.db"), Topics: topics(settings.Realm, settings.Topics), Broker: client, Connect: mqtt.New,
		KeepaliveInterval: time.Duration(settings.KeepaliveInterval), KeepaliveMissed: settings.KeepaliveMissed,
		Connections: o.limiter, Collectors: collectors, Log: log,
	})
	return o, err
}

// Serve serves REST, if configured, until ctx ends.
func (o *Orchestrator) Serve(ctx context.Context) error {
	if o.listener == nil {
		<-ctx.Done()
		return nil
	}
	return o.orchestrator.Serve(ctx, o.listener)
}

// Close closes the orchestrator and its servers. Modules keep running.
func (o *Orchestrator) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	return errors.Join(o.orchestrator.Close(ctx), o.closeServers())
}

func (o *Orchestrator) closeServers() error {
	if o.listener != nil {
		_ = o.listener.Close() // Serve may have closed it
	}
	o.limiter.Close()
	return closeBroker(o.broker)
}

// orchestrate runs the orchestrator of [orchestrator] in this process until the door closes. What keeps it from running is
// reported to Health and tried again: broker, manager and node work without it.
func (d *Door) orchestrate() {
	for d.life.Err() == nil {
		err := d.runOrchestrator()
		if d.life.Err() != nil {
			return
		}
		d.reportOrchestrator(err)
		_ = guard.Sleep(d.life, retryInterval)
	}
}

func (d *Door) reportOrchestrator(err error) {
	reason := "OrchestratorNotRunning"
	if health.DiskFault(err) {
		reason = health.DiskReason(err)
	}
	d.services.Health.Report("edge orchestrator", health.EdgeReady, reason, err)
}

// runOrchestrator runs the orchestrator until the door closes, or until it cannot serve REST.
func (d *Door) runOrchestrator() (err error) {
	lock, err := d.services.HoldDir(d.life, d.config.Orchestrator.Root)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	s := d.services
	s.running = d.broker
	o, err := openOrchestrator(d.life, d.config, d.config.Orchestrator.ForDaemon(&d.config.Edge), s)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, o.Close()); err != nil && d.life.Err() != nil {
			d.log.Warn("the orchestrator has not closed properly", "err", err)
		}
	}()
	d.reportOrchestrator(nil)
	d.log.Info("the orchestrator is open", "broker", o.BrokerURL, "address", d.config.Orchestrator.Address)
	return o.Serve(d.life)
}
