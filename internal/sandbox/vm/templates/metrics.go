package templates

import (
	"os"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
)

// Describe implements prometheus.Collector. The number of the series says how many templates there are.
func (t *Set) Describe(to chan<- *prometheus.Desc) {
	to <- t.bytes()
	to <- t.created()
}

func (t *Set) bytes() *prometheus.Desc {
	return prometheus.NewDesc("tripod_vm_template_bytes", "Room on the disk of each template of machines.", []string{"template", "namespace"},
		prometheus.Labels{"handler": t.kind.Handler})
}

func (t *Set) created() *prometheus.Desc {
	return prometheus.NewDesc("tripod_vm_template_created_timestamp_seconds", "When each template of machines was made, as a Unix time.",
		[]string{"template", "namespace"}, prometheus.Labels{"handler": t.kind.Handler})
}

// Collect implements prometheus.Collector.
func (t *Set) Collect(to chan<- prometheus.Metric) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, one := range t.have {
		if _, err := os.Stat(filepath.Join(t.dir, one.Name, recordFile)); err != nil {
			continue // somebody has removed it
		}
		to <- prometheus.MustNewConstMetric(t.bytes(), prometheus.GaugeValue, float64(one.Size), one.Name, one.Namespace)
		to <- prometheus.MustNewConstMetric(t.created(), prometheus.GaugeValue, float64(one.CreatedAt.Unix()), one.Name, one.Namespace)
	}
}
