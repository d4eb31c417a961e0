package metrics

import (
	"context"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/stats"
)

// samplesTimeout limits the measuring of all pods for a scrape.
const samplesTimeout = 8 * time.Second

// samples collects the metrics of containers, with the names and labels that a kubelet gives them.
type samples struct {
	measure func(context.Context) []node.PodSamples
}

var sampleDescs = func() map[*stats.Family]*prometheus.Desc {
	descs := make(map[*stats.Family]*prometheus.Desc, len(stats.Families))
	for _, f := range stats.Families {
		descs[f] = prometheus.NewDesc(f.Name, f.Help, slices.Concat(stats.BaseLabels, f.Labels), nil)
	}
	return descs
}()

func (s *samples) Describe(to chan<- *prometheus.Desc) {
	for _, f := range stats.Families {
		to <- sampleDescs[f]
	}
}

func (s *samples) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), samplesTimeout)
	defer cancel()
	for _, p := range s.measure(ctx) {
		put(to, p.ObjectSamples)
		for _, c := range p.Containers {
			put(to, c)
		}
	}
}

func put(to chan<- prometheus.Metric, o node.ObjectSamples) {
	base := o.Owner.Labels()
	for _, s := range o.Samples {
		kind := prometheus.GaugeValue
		if s.Family.Type == runtimeapi.MetricType_COUNTER {
			kind = prometheus.CounterValue
		}
		metric, err := prometheus.NewConstMetric(sampleDescs[s.Family], kind, s.Value, slices.Concat(base, s.Labels)...)
		if err != nil {
			metric = prometheus.NewInvalidMetric(sampleDescs[s.Family], err)
		}
		to <- prometheus.NewMetricWithTimestamp(o.Time, metric)
	}
}
