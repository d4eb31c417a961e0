package main

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node/store"
)

// healthInterval is the time between checks of whether the daemon's files are writable. It is shorter than the 5 s
// between the kubelet's Status calls, so each call gets a new result.
const healthInterval = 2 * time.Second

// watchHealth reports unusable stores and failed clean-ups until the daemon ends.
func (p *parts) watchHealth(record *store.Store, images *image.Store, log *slog.Logger) {
	check := func() {
		p.health.Report("record", health.RuntimeReady, health.DiskNotWritable, record.Err())
		err := images.Err()
		if err == nil {
			err = images.Writable()
		}
		p.health.Report("image store", health.RuntimeReady, health.DiskReason(err), err)
		p.health.Report("firewall", health.ForwardingReady, "FirewallDropsPods", p.network.Blocked())
		p.health.Report("leftovers", health.Clean, "LeftoversRemain", p.node.Leftovers())
	}
	check()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(guard.Every(ctx, log, "health", healthInterval, check))
	p.opened(func() error {
		cancel()
		wg.Wait()
		return nil
	})
	if p.metrics != nil {
		p.metrics.Register(problems{p.health})
	}
}

// problems exports a board to Prometheus.
type problems struct{ *health.Board }

var problemsDesc = prometheus.NewDesc("tripod_problem", "1 for each current problem of the node.",
	[]string{"problem", "condition", "reason"}, nil)

func (p problems) Describe(to chan<- *prometheus.Desc) { to <- problemsDesc }

func (p problems) Collect(to chan<- prometheus.Metric) {
	for _, one := range p.Problems() {
		to <- prometheus.MustNewConstMetric(problemsDesc, prometheus.GaugeValue, 1, one.Part, one.Condition, one.Reason)
	}
}
