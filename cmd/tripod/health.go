package main

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node/store"
)

// healthInterval is how often it is looked whether the daemon's files can be written. It lies below the kubelet's interval of
// asking for the status, 5 s.
const healthInterval = 2 * time.Second

// Reasons of conditions.
const (
	reasonReadOnly = "DiskNotWritable"
	reasonDamaged  = "StoreDamaged"
)

// watchHealth reports, now and as long as the daemon runs, which of its stores cannot be used and what could not be cleaned up.
func (p *parts) watchHealth(record *store.Store, images *image.Store, log *slog.Logger) {
	look := func() {
		p.health.Report("record", health.RuntimeReady, reasonReadOnly, record.Err())
		err := images.Err()
		if err == nil {
			err = images.Writable()
		}
		p.health.Report("image store", health.RuntimeReady, reasonOf(err), err)
		p.health.Report("leftovers", health.Clean, "LeftoversRemain", p.node.Leftovers())
	}
	look()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(guard.Loop(log, "health", func() { every(ctx, healthInterval, look) }))
	p.opened(func() error {
		cancel()
		wg.Wait()
		return nil
	})
	if p.metrics != nil {
		p.metrics.Register(problems{p.health})
	}
}

// every calls do until ctx ends.
func every(ctx context.Context, interval time.Duration, do func()) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			do()
		}
	}
}

func reasonOf(err error) string {
	if errdefs.IsDataLoss(err) {
		return reasonDamaged
	}
	return reasonReadOnly
}

// diskFault tells an error of a disk, or of what is on it, from one that the configuration can put right: the node goes on without
// the part that has it.
func diskFault(err error) bool {
	for _, errno := range []unix.Errno{unix.EROFS, unix.ENOSPC, unix.EDQUOT, unix.EIO} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return errdefs.IsDataLoss(err)
}

// problems shows a board to Prometheus.
type problems struct{ *health.Board }

var problemsDesc = prometheus.NewDesc("tripod_problem", "1 for each thing that the node cannot do at the moment.", []string{"problem", "condition", "reason"}, nil)

// Describe implements prometheus.Collector.
func (p problems) Describe(to chan<- *prometheus.Desc) { to <- problemsDesc }

// Collect implements prometheus.Collector.
func (p problems) Collect(to chan<- prometheus.Metric) {
	for _, one := range p.Problems() {
		to <- prometheus.MustNewConstMetric(problemsDesc, prometheus.GaugeValue, 1, one.Part, one.Condition, one.Reason)
	}
}
