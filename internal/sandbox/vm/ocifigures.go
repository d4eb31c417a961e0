package vm

import (
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// templateBytesDesc is the metric of the templates. It says how many there are, too.
var templateBytesDesc = prometheus.NewDesc("tripod_vm_template_bytes", "Room on the disk of each template of machines that run containers.", []string{"template", "namespace"}, nil)

// templateCreatedDesc is the metric of the templates' age.
var templateCreatedDesc = prometheus.NewDesc("tripod_vm_template_created_timestamp_seconds", "When each template of machines that run containers was made, as a Unix time.", []string{"template", "namespace"}, nil)

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
	to <- templateBytesDesc
	to <- templateCreatedDesc
	f.duration.Describe(to)
}

// Collect implements prometheus.Collector.
func (f ociFigures) Collect(to chan<- prometheus.Metric) {
	f.templates.mu.Lock()
	for _, t := range f.templates.have {
		if _, err := os.Stat(filepath.Join(f.templates.dir, t.Name, templateFile)); err != nil {
			continue // somebody has removed it
		}
		to <- prometheus.MustNewConstMetric(templateBytesDesc, prometheus.GaugeValue, float64(t.Size), t.Name, t.Namespace)
		to <- prometheus.MustNewConstMetric(templateCreatedDesc, prometheus.GaugeValue, float64(t.CreatedAt.Unix()), t.Name, t.Namespace)
	}
	f.templates.mu.Unlock()
	f.duration.Collect(to)
}

// Collector returns the metrics of the machines.
func (o *OCI) Collector() prometheus.Collector { return o.figures }
