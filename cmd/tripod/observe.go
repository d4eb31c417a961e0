package main

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/metrics"
)

// observers holds the node's metrics and tracing. Each is nil if disabled.
type observers struct {
	metrics *metrics.Metrics
	tracing *metrics.Tracing
}

// openTracing opens tracing, if configured. Call it before opening the backends, because they need the function that
// exports their spans.
func (p *parts) openTracing(ctx context.Context, c *config.Config, log *slog.Logger) error {
	if c.Tracing.Endpoint == "" {
		return nil
	}
	t, err := metrics.NewTracing(ctx, c.Tracing.Endpoint, version, log.With("part", "tracing"))
	if err != nil {
		return err
	}
	p.tracing = t
	p.opened(t.Close)
	return nil
}

// spans returns the function that exports workers' spans, or nil without tracing.
func (o *observers) spans() func([]byte) {
	if o.tracing == nil {
		return nil
	}
	return o.tracing.Forward
}

// serverOptions returns what records CRI calls: a span for each, and interceptors that count them. They must be the outermost
// ones, to see the calls' final codes.
func (o *observers) serverOptions() []grpc.ServerOption {
	var options []grpc.ServerOption
	if o.tracing != nil {
		options = append(options, o.tracing.ServerOption())
	}
	if o.metrics != nil {
		options = append(options, grpc.ChainUnaryInterceptor(o.metrics.Interceptor()), grpc.ChainStreamInterceptor(o.metrics.StreamInterceptor()))
	}
	return options
}

// openMetrics serves metrics, if configured. Call it after opening the node.
func (p *parts) openMetrics(ctx context.Context, c *config.Config, log *slog.Logger) error {
	if c.Metrics.Address == "" {
		return nil
	}
	m := metrics.New(metrics.Config{Version: version, Pods: p.node.Pods, Samples: p.node.Samples, Logger: log.With("part", "metrics")})
	if p.tracing != nil {
		m.Register(p.tracing.Dropped())
	}
	m.Register(connectionFigures{p.connectionStats})
	m.Register(p.plugins.Collector())
	m.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tripod_network_releases_pending", Help: "Networks of stopped pods whose release in the background is not complete.",
	}, func() float64 { return float64(p.network.PendingReleases()) }))
	if p.linux != nil {
		m.Register(p.linux.Collector())
	}
	if p.vm != nil {
		m.Register(p.vm.Collector())
	}
	if p.oci != nil {
		m.Register(p.oci.Collector())
	}
	if p.wasm != nil {
		for _, c := range p.wasm.Collectors(p.node.Components()) {
			m.Register(c)
		}
	}
	if _, err := m.Listen(ctx, c.Metrics.Address, p.connections.Limiter("metrics", limits(c.Connections))); err != nil {
		return err
	}
	p.metrics = m
	p.opened(m.Close)
	return nil
}
