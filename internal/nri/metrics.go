package nri

import (
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
)

// calls counts and times the calls of plugins, by event: the hook that called the plugin, such as CreateContainer.
type calls struct {
	made  *prometheus.CounterVec
	times *prometheus.HistogramVec
}

func newCalls() calls {
	return calls{
		made: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tripod_nri_calls_total",
			Help: "Calls of plugins of the node (NRI), by plugin, event and result: ok or error.",
		}, []string{"plugin", "event", "result"}),
		times: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tripod_nri_call_duration_seconds",
			Help:    "Time that plugins of the node (NRI) took to answer, by plugin and event.",
			Buckets: []float64{.001, .005, .025, .1, .5, 2, 10},
		}, []string{"plugin", "event"}),
	}
}

// Describe and Collect implement prometheus.Collector.
func (c calls) Describe(to chan<- *prometheus.Desc) {
	c.made.Describe(to)
	c.times.Describe(to)
}

func (c calls) Collect(to chan<- prometheus.Metric) {
	c.made.Collect(to)
	c.times.Collect(to)
}

// Collector returns the metrics of plugins' calls.
func (x *Plugins) Collector() prometheus.Collector { return x.calls }

// UpdatePluginCount implements adaptation.Metrics.
func (x *Plugins) UpdatePluginCount(count int) {
	x.connected.Store(int64(count))
	x.syncing.Store(false)
}

func (x *Plugins) RecordPluginInvocation(plugin, operation string, err error) {
	result := "ok"
	if err != nil {
		result = "error"
		x.log.Warn("a plugin's call failed", "plugin", plugin, "call", operation, "err", err)
	}
	x.calls.made.WithLabelValues(plugin, operation, result).Inc()
}

func (x *Plugins) RecordPluginLatency(plugin, operation string, took time.Duration) {
	x.calls.times.WithLabelValues(plugin, operation).Observe(took.Seconds())
}

func (x *Plugins) RecordPluginAdjustments(plugin, operation string, _ *api.ContainerAdjustment, updates, evictions int) {
	x.log.Debug("a plugin answered", "plugin", plugin, "call", operation, "updates", updates, "evictions", evictions)
}
