package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/node"
)

// pods collects the number of pods and containers.
type pods struct{ list func() []*node.Pod }

var (
	podsDesc = prometheus.NewDesc("tripod_pods", "Pods, by RuntimeClass handler and state; a unit pod has the state of its container.",
		[]string{"handler", "state"}, nil)
	containersDesc = prometheus.NewDesc("tripod_containers", "Containers, by RuntimeClass handler and state.", []string{"handler", "state"},
		nil)
)

func (p *pods) Describe(to chan<- *prometheus.Desc) { to <- podsDesc; to <- containersDesc }

type podKey struct{ handler, state string }

func (p *pods) Collect(to chan<- prometheus.Metric) {
	pods, containers := map[podKey]int{}, map[podKey]int{}
	for _, pod := range p.list() {
		state := pod.State
		if pod.Unit() {
			state = pod.UnitState()
		}
		pods[podKey{pod.Handler, string(state)}]++
		for _, c := range pod.Visible() {
			containers[podKey{pod.Handler, string(c.State)}]++
		}
	}
	for desc, counts := range map[*prometheus.Desc]map[podKey]int{podsDesc: pods, containersDesc: containers} {
		for key, n := range counts {
			to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(n), key.handler, key.state)
		}
	}
}
