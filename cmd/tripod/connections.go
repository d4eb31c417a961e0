package main

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
)

// limits converts the configured connection limits, which apply to each address.
func limits(c config.Connections) connlimit.Config {
	perPeer := c.MaxPerPeer
	if perPeer == 0 {
		perPeer = -1
	}
	return connlimit.Config{
		Max: c.Max, MaxPerPeer: perPeer, MaxHeaderBytes: c.MaxHeader,
		HeaderTimeout: time.Duration(c.HeaderTimeout), IdleTimeout: time.Duration(c.IdleTimeout),
	}
}

var (
	openConnections = prometheus.NewDesc("tripod_connections",
		"Open connections, by listening address.", []string{"address"}, nil)
	rejectedConnections = prometheus.NewDesc("tripod_connections_rejected_total",
		"Connections that were refused (max, peer, files), closed for a newcomer (displaced) or sent no request in time (expired), by address.",
		[]string{"address", "reason"}, nil)
)

// connectionFigures exports connection counts to Prometheus.
type connectionFigures struct{ stats func() []connlimit.Stats }

func (connectionFigures) Describe(to chan<- *prometheus.Desc) {
	to <- openConnections
	to <- rejectedConnections
}

func (c connectionFigures) Collect(to chan<- prometheus.Metric) {
	for _, s := range c.stats() {
		to <- prometheus.MustNewConstMetric(openConnections, prometheus.GaugeValue, float64(s.Open), s.Name)
		for reason, n := range s.Rejected {
			to <- prometheus.MustNewConstMetric(rejectedConnections, prometheus.CounterValue, float64(n), s.Name, reason)
		}
	}
}
