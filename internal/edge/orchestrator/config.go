package orchestrator

import (
	"cmp"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Config configures an Orchestrator. Path, Topics and Connect are required; other zero values mean the defaults.
type Config struct {
	// Path is the record's file. Its directory must exist.
	Path   string
	Topics wire.Topics
	// Broker configures the connection. Open sets Handler, NoLocal, Log and the callbacks.
	Broker mqtt.Config
	// Connect makes the client. Use mqtt.New.
	Connect func(mqtt.Config) (mqtt.Client, error)

	// AnswerTimeout is the time that another orchestrator with the same session has to answer; 5 s by default.
	AnswerTimeout time.Duration

	// KeepaliveInterval is the ka_interval_sec in answers to registrations; 60 s by default. If a peer that should send
	// keepalives (Record.Beats) is silent for KeepaliveMissed intervals (3 by default), it is marked dead.
	KeepaliveInterval time.Duration
	KeepaliveMissed   int
	// RestartMin and RestartMax bound the delay before an ended module is created again; 1 s and 5 min by default. The
	// delay doubles with each restart. A module that runs for RestartReset (10 min by default) resets the delay.
	RestartMin, RestartMax, RestartReset time.Duration
	// KeepDead is the number of dead records of each kind to keep; 1000 by default.
	KeepDead int

	// Connections limits the connections to the REST interface. By default, connlimit's default limits apply.
	Connections *connlimit.Limiter
	// Collectors add metrics to /metrics.
	Collectors []prometheus.Collector
	// Now is the clock; time.Now by default.
	Now func() time.Time
	Log *slog.Logger
}

func (c Config) complete() (Config, error) {
	if c.Path == "" || c.Connect == nil || channel.ValidTopic(c.Topics.Control()) != nil || c.Topics.Realm == "" {
		return c, fmt.Errorf("an orchestrator needs the path of its record, a realm and a broker: %w", errdefs.ErrInvalidArgument)
	}
	c.AnswerTimeout = cmp.Or(max(c.AnswerTimeout, 0), 5*time.Second)
	c.KeepaliveInterval = cmp.Or(max(c.KeepaliveInterval, 0), time.Minute)
	c.KeepaliveMissed = cmp.Or(max(c.KeepaliveMissed, 0), 3)
	c.RestartMin = cmp.Or(max(c.RestartMin, 0), time.Second)
	c.RestartMax = cmp.Or(max(c.RestartMax, 0), 5*time.Minute)
	c.RestartReset = cmp.Or(max(c.RestartReset, 0), 10*time.Minute)
	c.KeepDead = cmp.Or(max(c.KeepDead, 0), 1000)
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Connections == nil {
		c.Connections = connlimit.NewGroup(c.Log).Limiter("rest", connlimit.Config{})
	}
	return c, nil
}
