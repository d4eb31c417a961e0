package orchestrator

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tripod-run/tripod/internal/guard"
)

// counters are updated as events happen; Collect computes the other metrics.
type counters struct {
	messages  *prometheus.CounterVec
	published *prometheus.CounterVec
}

func newCounters() *counters {
	return &counters{
		messages: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tripod_orchestrator_messages_total", Help: "Messages received, by topic and result.",
		}, []string{"topic", "result"}),
		published: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tripod_orchestrator_published_total", Help: "Messages handed to the MQTT client, by result.",
		}, []string{"result"}),
	}
}

var (
	recordsDesc = prometheus.NewDesc("tripod_orchestrator_records", "Managers, runtimes and modules, by state: A, Q, E, K, D.",
		[]string{"type", "status"}, nil)
	slotsDesc = prometheus.NewDesc("tripod_orchestrator_slots", "Slots for modules of living runtimes: used and all.",
		[]string{"runtime", "of"}, nil)
	restartsDesc = prometheus.NewDesc("tripod_orchestrator_restarts_pending", "Modules that will be created again after their back-off.", nil,
		nil)
	connectedDesc = prometheus.NewDesc("tripod_orchestrator_broker_connected", "1 while the broker is connected.", nil, nil)
	connectsDesc  = prometheus.NewDesc("tripod_orchestrator_broker_connects_total", "Connections that the broker has accepted.", nil, nil)
	droppedDesc   = prometheus.NewDesc("tripod_orchestrator_broker_dropped_total", "Messages that the MQTT client has dropped from its queue.",
		nil, nil)
	queuedDesc = prometheus.NewDesc("tripod_orchestrator_broker_queued", "Messages that wait for the broker.", nil, nil)
)

// Describe implements prometheus.Collector.
func (o *Orchestrator) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{recordsDesc, slotsDesc, restartsDesc, connectedDesc, connectsDesc, droppedDesc, queuedDesc} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (o *Orchestrator) Collect(to chan<- prometheus.Metric) {
	// guarded, because a panic in one of the registry's goroutines would end the process
	guard.Func(o.log, "metrics", func() { o.collect(to) })()
}

func (o *Orchestrator) collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	used, pending := o.state.slots(), 0
	for _, kind := range kinds {
		states := map[Status]int{}
		for _, r := range o.state.list(kind) {
			states[r.Status]++
			if r.RestartAt != nil {
				pending++
			}
		}
		for status, n := range states {
			gauge(recordsDesc, float64(n), string(kind), string(status))
		}
	}
	for _, r := range o.state.list(Runtime) {
		if r.Status == Alive {
			gauge(slotsDesc, float64(used[r.UUID]), r.UUID, "used")
			gauge(slotsDesc, float64(r.slots()), r.UUID, "all")
		}
	}
	gauge(restartsDesc, float64(pending))
	connected := 0.0
	if o.Connected() {
		connected = 1
	}
	gauge(connectedDesc, connected)
	s := o.client.Stats()
	gauge(queuedDesc, float64(s.Queued))
	to <- prometheus.MustNewConstMetric(connectsDesc, prometheus.CounterValue, float64(s.Connects))
	to <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(s.Dropped))
}

// metricsHandler answers GET /metrics.
func (o *Orchestrator) metricsHandler() http.Handler {
	registry := prometheus.NewRegistry()
	panics := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "tripod_recovered_panics_total", Help: "Panics that one message or request had and the process survived; each is a defect.",
	}, func() float64 { return float64(guard.Total()) })
	registry.MustRegister(o, panics, o.counts.messages, o.counts.published, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	registry.MustRegister(o.config.Collectors...)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		EnableOpenMetrics: true, MaxRequestsInFlight: 4, Timeout: 10 * time.Second, ErrorHandling: promhttp.ContinueOnError,
	})
}
