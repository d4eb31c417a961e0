package vm

import (
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ociFigures are the metrics of machines that run containers.
type ociFigures struct {
	templates *templates
	duration  *prometheus.HistogramVec
}

func newOCIFigures(t *templates) ociFigures {
	return ociFigures{templates: t, duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "tripod_vm_oci_start_duration_seconds", Help: "Time until a machine that runs containers was ready for its pod, by where it came from: template or boot.",
		Buckets: []float64{0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32},
	}, []string{"from"})}
}

// started counts a machine that is ready for its pod.
func (f ociFigures) started(template string, took time.Duration) {
	from := "template"
	if template == "" {
		from = "boot"
	}
	f.duration.WithLabelValues(from).Observe(took.Seconds())
}

// Describe implements prometheus.Collector.
func (f ociFigures) Describe(to chan<- *prometheus.Desc) {
	f.templates.Describe(to)
	f.duration.Describe(to)
}

// Collect implements prometheus.Collector.
func (f ociFigures) Collect(to chan<- prometheus.Metric) {
	f.templates.Collect(to)
	f.duration.Collect(to)
}

// Describe implements prometheus.Collector. The number of the series says how many templates there are.
func (t *templates) Describe(to chan<- *prometheus.Desc) {
	to <- t.bytes()
	to <- t.created()
}

func (t *templates) bytes() *prometheus.Desc {
	return prometheus.NewDesc("tripod_vm_template_bytes", "Room on the disk of each template of machines.", []string{"template", "namespace"},
		prometheus.Labels{"handler": t.kind.handler})
}

func (t *templates) created() *prometheus.Desc {
	return prometheus.NewDesc("tripod_vm_template_created_timestamp_seconds", "When each template of machines was made, as a Unix time.",
		[]string{"template", "namespace"}, prometheus.Labels{"handler": t.kind.handler})
}

// Collect implements prometheus.Collector.
func (t *templates) Collect(to chan<- prometheus.Metric) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, one := range t.have {
		if _, err := os.Stat(filepath.Join(t.dir, one.Name, templateFile)); err != nil {
			continue // somebody has removed it
		}
		to <- prometheus.MustNewConstMetric(t.bytes(), prometheus.GaugeValue, float64(one.Size), one.Name, one.Namespace)
		to <- prometheus.MustNewConstMetric(t.created(), prometheus.GaugeValue, float64(one.CreatedAt.Unix()), one.Name, one.Namespace)
	}
}

// Collector returns the metrics of the templates.
func (b *Backend) Collector() prometheus.Collector { return b.templates }

// Collector returns the metrics of the machines.
func (o *OCI) Collector() prometheus.Collector { return o.figures }
