package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/orchestrator"
	"github.com/tripod-run/tripod/internal/guard"
)

// orchestratorSession is how long the broker keeps messages for a disconnected orchestrator: clients' requests, exits,
// last wills.
const orchestratorSession = 24 * time.Hour

// Orchestrator is an orchestrator with its REST listener and its embedded broker, if these are configured.
type Orchestrator struct {
	// BrokerURL is the broker's address for a client on this host.
	BrokerURL    string
	orchestrator *orchestrator.Orchestrator
	listener     net.Listener  // nil without REST
	broker       broker.Broker // nil unless embedded
}

// OpenOrchestrator opens an orchestrator. Its record is in the directory orchestrator.root, which must exist. Its REST
// interface also serves the metrics of the given collectors.
func OpenOrchestrator(ctx context.Context, c *config.Config, s Services, collectors ...prometheus.Collector) (_ *Orchestrator, err error) {
	settings, log := c.Orchestrator, s.Logger.With("part", "orchestrator")
	client, b, err := s.connect(c, brokerSettings{
		section: "orchestrator", url: settings.Broker, user: settings.User, passwordFile: settings.PasswordFile, ca: settings.CA,
		cert: settings.Certificate, key: settings.Key, protocol: settings.Protocol, store: filepath.Join(settings.Root, "broker.db"),
	}, log)
	if err != nil {
		return nil, err
	}
	o := &Orchestrator{BrokerURL: client.URL, broker: b}
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
	client.ClientID, client.SessionExpiry, client.MaxPacket = "tripod-orchestrator-"+settings.Realm, orchestratorSession, int64(c.Broker.MaxMessage)
	o.orchestrator, err = orchestrator.Open(ctx, orchestrator.Config{
		Path: filepath.Join(settings.Root, "record.db"), Topics: topics(settings.Realm, settings.Topics), Broker: client, Connect: mqtt.New,
		KeepaliveInterval: time.Duration(settings.KeepaliveInterval), KeepaliveMissed: settings.KeepaliveMissed,
		Connections: s.Connections.Limiter("rest", s.Limits), Collectors: collectors, Log: log,
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
	return closeBroker(o.broker)
}

// hosted is the orchestrator in a daemon.
type hosted struct {
	*Orchestrator
	lock io.Closer
}

// host opens the orchestrator of [orchestrator] in this process and serves its REST interface until the door closes.
func (d *Door) host() (*hosted, error) {
	lock, err := d.services.HoldDir(d.config.Orchestrator.Root)
	if err != nil {
		return nil, err
	}
	o, err := OpenOrchestrator(d.life, d.config, d.services)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	d.tasks.Go(guard.Func(d.log, "orchestrator REST", func() {
		if err := o.Serve(d.life); err != nil {
			d.log.Error("the orchestrator's REST interface has ended", "err", err)
		}
	}))
	return &hosted{o, lock}, nil
}

func (h *hosted) Close() error {
	if h == nil {
		return nil
	}
	return errors.Join(h.Orchestrator.Close(), h.lock.Close())
}
