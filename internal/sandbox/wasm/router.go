package wasm

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/collector"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/router"
)

// Components is the node's map of components; *node.Index is one.
type Components = router.Components

// RouteConfig says where the node itself takes requests for components.
type RouteConfig = router.ServeConfig

// Route takes requests at addresses of the node and hands each to a pod that runs the component it is for, until the returned
// function is called.
func (b *Backend) Route(ctx context.Context, components Components, c RouteConfig) (stop func(), err error) {
	return router.Open(ctx, router.Config{Components: components, Services: b.servicesOf, Dial: b.dialData, Logger: c.Logger}, c)
}

// Collector gives the figures of components to Prometheus.
func (b *Backend) Collector(components Components) prometheus.Collector {
	return &collector.Components{List: b.metrics, Running: components.All}
}
