package wasm

import (
	"context"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/collector"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/requests"
)

// Components is the node's component map. *node.Index implements it.
type Components = requests.Components

// RouteConfig configures the addresses of the node's router.
type RouteConfig = requests.ServeConfig

// Route accepts requests at the configured addresses of the node until the returned function is called. It forwards
// each request to a pod that runs the requested component.
func (b *Backend) Route(ctx context.Context, components Components, c RouteConfig) (stop func(), err error) {
	return requests.Open(ctx, requests.Config{Components: components, Services: b.servicesOf, Dial: b.dialData, Logger: c.Logger}, c)
}

// Collectors returns Prometheus collectors for the metrics of components and of their compilations.
func (b *Backend) Collectors(components Components) []prometheus.Collector {
	running := func() map[string][]string { return b.running(components) }
	return append(b.cache.Collectors(), &collector.Components{List: b.metrics, Running: running})
}

// running returns the running containers of each component: those of the node's map, and foreign ones, which are not in
// the map because the node's addresses do not lead to them.
func (b *Backend) running(components Components) map[string][]string {
	all := maps.Clone(components.All())
	for _, h := range b.ledger.All() {
		if s, l := h.Snapshot(); l != nil && sandbox.IsForeign(l.pod, l.container) {
			all[s.Component] = append(slices.Clone(all[s.Component]), h.ID)
		}
	}
	return all
}
