package oci

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
)

// figures are the metrics of machines that run containers.
type figures struct {
	templates *templates.Set
	duration  *prometheus.HistogramVec
}

func newFigures(t *templates.Set) figures {
	return figures{templates: t, duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "tripod_vm_oci_start_duration_seconds",
		Help:    "Time until a machine that runs containers was ready for its pod, by where it came from: template or boot.",
		Buckets: []float64{0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32},
	}, []string{"from"})}
}

// started counts a machine that is ready for its pod.
func (f figures) started(template string, took time.Duration) {
	from := "template"
	if template == "" {
		from = "boot"
	}
	f.duration.WithLabelValues(from).Observe(took.Seconds())
}

// Describe implements prometheus.Collector.
func (f figures) Describe(to chan<- *prometheus.Desc) {
	f.templates.Describe(to)
	f.duration.Describe(to)
}

// Collect implements prometheus.Collector.
func (f figures) Collect(to chan<- prometheus.Metric) {
	f.templates.Collect(to)
	f.duration.Collect(to)
}

// Collector returns the metrics of the machines.
func (o *Backend) Collector() prometheus.Collector { return o.figures }
