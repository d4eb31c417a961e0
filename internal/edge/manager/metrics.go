package manager

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/loglimit"
)

// logEvery is the minimum time between log lines for the same reason, so that no peer can fill the disk.
const logEvery = time.Second

// counts are the manager's counters.
type counts struct {
	refused *prometheus.CounterVec // by reason
	dropped *prometheus.CounterVec // by reason
	exited  *prometheus.CounterVec // by reason
	lost    *prometheus.CounterVec // by runtime
	ignored prometheus.Counter
	losses  loglimit.Limiter[loss] // of the log lines about dropped messages

	mu     sync.Mutex
	logged map[string]time.Time // by reason
}

// loss says which messages were dropped, and why. A message of the manager itself has no module.
type loss struct{ reason, module, topic string }

func newCounts() *counts {
	vec := func(name, help string, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tripod_edge_" + name, Help: help}, []string{label})
	}
	return &counts{
		refused: vec("refused_total", "Messages and orders that were not obeyed, by reason.", "reason"),
		dropped: vec("dropped_messages_total", "Messages that were dropped, by reason.", "reason"),
		exited:  vec("exited_modules_total", "Modules that have ended, by reason.", "reason"),
		lost:    vec("runtime_losses_total", "Unexpected ends of a runtime.", "runtime"),
		ignored: prometheus.NewCounter(prometheus.CounterOpts{Name: "tripod_edge_ignored_messages_total",
			Help: "Control messages that are not requests to the manager, including its own."}),
		logged: map[string]time.Time{},
		losses: loglimit.Limiter[loss]{Every: logEvery},
	}
}

// mayLog reports whether to log a failure with this reason now.
func (c *counts) mayLog(reason string, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.logged[reason]) < logEvery {
		return false
	}
	c.logged[reason] = now
	return true
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("tripod_edge_"+name, help, labels, nil)
}

var (
	connectedNow  = describe("broker_connected", "Whether the manager is connected to its broker.")
	connectsTotal = describe("broker_connects_total", "Connections that the broker has accepted.")
	registeredNow = describe("registered", "Whether the orchestrator has accepted the manager in this connection.")
	queuedNow     = describe("broker_queued_messages", "Messages of QoS 1 and 2 that wait for the broker.")
	expiredTotal  = describe("broker_queue_dropped_messages_total",
		"Messages of QoS 1 and 2 that were dropped from the queue for the broker: no room, too old, or refused.")
	lostTotal    = describe("broker_lost_messages_total", "Messages of QoS 0 that were dropped: no connection, or no room.")
	outNow       = describe("out_queued_messages", "Messages of modules that wait for the MQTT client.")
	upNow        = describe("runtime_up", "Whether the runtime is up.", "runtime")
	modulesNow   = describe("modules", "Modules, by runtime and state.", "runtime", "state")
	channelTotal = describe("channel_messages_total",
		"Messages of channels: published by modules, delivered to them, received from the broker, unmatched, refused.", "what")
)

func (m *Manager) vecs() []prometheus.Collector {
	return []prometheus.Collector{m.counts.refused, m.counts.dropped, m.counts.exited, m.counts.lost, m.counts.ignored}
}

// Describe implements prometheus.Collector.
func (m *Manager) Describe(to chan<- *prometheus.Desc) {
	for _, c := range m.vecs() {
		c.Describe(to)
	}
	for _, d := range []*prometheus.Desc{connectedNow, connectsTotal, registeredNow, queuedNow, expiredTotal, lostTotal, outNow, upNow,
		modulesNow, channelTotal} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Manager) Collect(to chan<- prometheus.Metric) {
	for _, c := range m.vecs() {
		c.Collect(to)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	s := m.client.Stats()
	gauge(connectedNow, truth(m.client.Connected()))
	gauge(registeredNow, truth(m.registered.Load()))
	gauge(queuedNow, float64(s.Queued))
	gauge(outNow, float64(m.out.queue.len()))
	counter(connectsTotal, s.Connects)
	counter(expiredTotal, s.Dropped)
	counter(lostTotal, s.Lost)
	r := m.router.Stats()
	counter(channelTotal, r.Published, "published")
	counter(channelTotal, r.Refused, "refused")
	counter(channelTotal, r.Delivered, "delivered")
	counter(channelTotal, r.FromBroker, "from-broker")
	counter(channelTotal, r.Unmatched, "unmatched")
	for _, h := range m.hosts {
		now := h.reportNow()
		gauge(upNow, truth(now.Up), h.info.Name)
		modules := map[string]int{reportedWaiting: 0, reportedFinished: 0}
		for _, s := range states {
			modules[s.reported] = 0
		}
		for _, mod := range now.Modules {
			modules[mod.State]++
		}
		for name, n := range modules {
			gauge(modulesNow, float64(n), h.info.Name, name)
		}
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
