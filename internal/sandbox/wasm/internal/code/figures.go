package code

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// figures are the metrics of compilations.
type figures struct {
	queue    *queue
	duration *prometheus.HistogramVec
}

var (
	queuedDesc = prometheus.NewDesc("tripod_component_compilations_queued",
		"Components that wait for their compilation, by what wants them: pod, pull, or background (images that were stored before the daemon started).", []string{"priority"}, nil)
	runningDesc = prometheus.NewDesc("tripod_component_compilations_running", "Components that are being compiled, by what wants them.",
		[]string{"priority"}, nil)
)

func newFigures(q *queue) figures {
	return figures{queue: q, duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "tripod_component_compile_duration_seconds",
		Help:    "Duration of compilations without their time in the queue, by result: compiled, failed or cancelled, and by code: quick (with which a pod can begin) or optimised.",
		Buckets: []float64{0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120},
	}, []string{"result", "code"})}
}

// ended counts a compilation, whose context is ctx.
func (f figures) ended(ctx context.Context, c sandbox.Compilation, quick bool) {
	result, code := string(c.State), "optimised"
	if quick {
		code = "quick"
	}
	if ctx.Err() != nil {
		result = "cancelled"
	}
	f.duration.WithLabelValues(result, code).Observe(c.Took.Seconds())
}

// Describe implements prometheus.Collector.
func (f figures) Describe(to chan<- *prometheus.Desc) {
	to <- queuedDesc
	to <- runningDesc
	f.duration.Describe(to)
}

// Collect implements prometheus.Collector.
func (f figures) Collect(to chan<- prometheus.Metric) {
	queued, running := f.queue.lengths()
	for p, name := range priorities {
		to <- prometheus.MustNewConstMetric(queuedDesc, prometheus.GaugeValue, float64(queued[p]), name)
		to <- prometheus.MustNewConstMetric(runningDesc, prometheus.GaugeValue, float64(running[p]), name)
	}
	f.duration.Collect(to)
}
