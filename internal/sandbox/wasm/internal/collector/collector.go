// Package collector exports the metrics of components to Prometheus. It sums the workers' counters by component, so
// that a counter is not reset when a container is replaced.
package collector

import (
	"context"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// collectTimeout limits the wait for the workers.
const collectTimeout = 5 * time.Second

// Workload is a worker's report about one container of a component.
type Workload struct {
	workerapi.Metrics
	Stats workerapi.Stats
}

// Components aggregates the metrics of each component's containers. A counter must not decrease when a container
// disappears, so the container's last values are kept.
type Components struct {
	// List returns the containers that workers know about, including stopped ones.
	List func(ctx context.Context) []Workload
	// Running returns the running containers of each component.
	Running func() map[string][]string

	mu   sync.Mutex
	seen map[string]Workload // last values, by container ID
	gone map[string]*totals  // sums of removed containers, by component
}

// totals are the metrics of a component.
type totals struct {
	containers, instances, active  int
	memory                         uint64
	cpu, throttled, logDropped     uint64
	channelDropped                 uint64
	requests, traps, timeouts, oom uint64
	connections                    int
	rejected                       map[string]uint64 // connections, by reason
	methods                        map[string]*workerapi.MethodMetrics
}

func gauge(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("tripod_component_"+name, help, append([]string{"component"}, labels...), nil)
}

var (
	containersOf = gauge("containers", "Running containers of the component.")
	instancesOf  = gauge("instances", "Live instances of the component.")
	memoryOf     = gauge("memory_bytes", "Linear memory and tables of the component's live instances.")
	cpuOf        = gauge("cpu_seconds_total", "CPU time used by the component's guests.")
	throttledOf  = gauge("throttled_seconds_total", "Time that guests have waited for CPU quota.")
	endedOf      = gauge("guests_ended_total", "Guests that were killed, by cause: trap, deadline, memory.", "cause")
	droppedOf    = gauge("log_dropped_bytes_total", "Output that could not be written to the container's log.")
	lostOf       = gauge("channel_dropped_messages_total",
		"Messages of the component's channels that were dropped because the daemon was absent or the component did not read them.")
	connectionsOf = gauge("connections", "Open connections of clients.")
	rejectedOf    = gauge("connections_rejected_total",
		"Connections that were refused (max, peer, files), closed for a new connection (displaced) or closed because they sent no request in time (expired).", "reason")
	inFlightOf = gauge("requests_in_flight", "Requests in progress.", "method")
	requestsOf = gauge("requests_total",
		"Requests answered, by gRPC method and code. For plain HTTP, the method is HTTP and the code is the status.", "method", "code")
	durationOf = gauge("request_duration_seconds", "Duration of requests, to the last byte of the response.", "method")
	receivedOf = gauge("received_bytes_total", "Bytes of request messages.", "method")
	sentOf     = gauge("sent_bytes_total", "Bytes of response messages.", "method")
)

// Describe implements prometheus.Collector.
func (c *Components) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{containersOf, instancesOf, memoryOf, cpuOf, throttledOf, endedOf, droppedOf, lostOf, connectionsOf,
		rejectedOf, inFlightOf, requestsOf, durationOf, receivedOf, sentOf} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (c *Components) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	all := c.sum(c.List(ctx))
	for name, containers := range c.Running() {
		of(all, name).containers = len(containers)
	}
	for name, t := range all {
		t.write(to, name)
	}
}

// sum returns the totals of each component: the sums of removed containers plus the values of the given workloads.
func (c *Components) sum(now []Workload) map[string]*totals {
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := make(map[string]Workload, len(now))
	for _, w := range now {
		if before, ok := c.seen[w.ID]; ok && restarted(before, w) {
			c.keep(before)
		}
		seen[w.ID] = w
	}
	for id, w := range c.seen {
		if _, ok := seen[id]; !ok {
			c.keep(w)
		}
	}
	c.seen = seen
	all := map[string]*totals{}
	for name, t := range c.gone {
		all[name] = t.clone()
	}
	for _, w := range now {
		t := of(all, w.Component)
		t.add(w)
		t.instances += w.Stats.Instances
		t.active += w.Stats.Active
		t.memory += w.Stats.MemoryBytes
		t.connections += w.Stats.Connections
	}
	return all
}

// restarted reports whether a container's counters have been reset.
func restarted(before, now Workload) bool {
	return now.Stats.Requests < before.Stats.Requests || now.Stats.CPUNanos < before.Stats.CPUNanos
}

// keep adds a container's last counters to the sums of removed containers.
func (c *Components) keep(w Workload) {
	if c.gone == nil {
		c.gone = map[string]*totals{}
	}
	of(c.gone, w.Component).add(w)
}

func of(all map[string]*totals, component string) *totals {
	if all[component] == nil {
		all[component] = &totals{methods: map[string]*workerapi.MethodMetrics{}, rejected: map[string]uint64{}}
	}
	return all[component]
}

func (t *totals) add(w Workload) {
	t.cpu += w.Stats.CPUNanos
	t.throttled += w.Stats.ThrottledNanos
	t.requests += w.Stats.Requests
	t.traps += w.Stats.Traps
	t.timeouts += w.Stats.Timeouts
	t.oom += w.Stats.OutOfMemory
	t.logDropped += w.Stats.LogDropped
	t.channelDropped += w.Stats.ChannelDropped
	for reason, n := range w.Stats.Rejected {
		t.rejected[reason] += n
	}
	for _, m := range w.Methods {
		sum := t.methods[m.Procedure]
		if sum == nil {
			sum = &workerapi.MethodMetrics{Procedure: m.Procedure, Codes: map[string]uint64{}}
			t.methods[m.Procedure] = sum
		}
		addMethod(sum, m)
	}
}

func addMethod(sum *workerapi.MethodMetrics, m workerapi.MethodMetrics) {
	sum.InFlight += m.InFlight
	sum.ReceivedBytes += m.ReceivedBytes
	sum.SentBytes += m.SentBytes
	sum.Seconds += m.Seconds
	for code, n := range m.Codes {
		sum.Codes[code] += n
	}
	if len(sum.Buckets) == 0 {
		sum.Bounds, sum.Buckets = m.Bounds, make([]uint64, len(m.Buckets))
	}
	if len(sum.Buckets) != len(m.Buckets) {
		return // from a worker of another version
	}
	for i, n := range m.Buckets {
		sum.Buckets[i] += n
	}
}

// clone copies the counters but not the gauges, because removed containers contribute nothing to gauges.
func (t *totals) clone() *totals {
	copied := *t
	copied.rejected = maps.Clone(t.rejected)
	copied.methods = map[string]*workerapi.MethodMetrics{}
	for name, m := range t.methods {
		sum := &workerapi.MethodMetrics{Procedure: name, Codes: map[string]uint64{}}
		addMethod(sum, *m)
		sum.InFlight = 0
		copied.methods[name] = sum
	}
	return &copied
}

func (t *totals) write(to chan<- prometheus.Metric, component string) {
	put := func(desc *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(desc, kind, v, append([]string{component}, labels...)...)
	}
	const second = float64(time.Second)
	put(containersOf, prometheus.GaugeValue, float64(t.containers))
	put(instancesOf, prometheus.GaugeValue, float64(t.instances))
	put(memoryOf, prometheus.GaugeValue, float64(t.memory))
	put(cpuOf, prometheus.CounterValue, float64(t.cpu)/second)
	put(throttledOf, prometheus.CounterValue, float64(t.throttled)/second)
	put(droppedOf, prometheus.CounterValue, float64(t.logDropped))
	put(lostOf, prometheus.CounterValue, float64(t.channelDropped))
	put(connectionsOf, prometheus.GaugeValue, float64(t.connections))
	for reason, n := range t.rejected {
		put(rejectedOf, prometheus.CounterValue, float64(n), reason)
	}
	for cause, n := range map[string]uint64{"trap": t.traps, "deadline": t.timeouts, "memory": t.oom} {
		put(endedOf, prometheus.CounterValue, float64(n), cause)
	}
	for procedure, m := range t.methods {
		method := strings.TrimPrefix(procedure, "/")
		put(inFlightOf, prometheus.GaugeValue, float64(m.InFlight), method)
		put(receivedOf, prometheus.CounterValue, float64(m.ReceivedBytes), method)
		put(sentOf, prometheus.CounterValue, float64(m.SentBytes), method)
		for code, n := range m.Codes {
			put(requestsOf, prometheus.CounterValue, float64(n), method, code)
		}
		to <- histogram(m, component, method)
	}
}

// histogram converts a method's durations to a cumulative Prometheus histogram.
func histogram(m *workerapi.MethodMetrics, component, method string) prometheus.Metric {
	buckets, count := make(map[float64]uint64, len(m.Bounds)), uint64(0)
	for i, n := range m.Buckets {
		count += n
		if i < len(m.Bounds) {
			buckets[m.Bounds[i]] = count
		}
	}
	return prometheus.MustNewConstHistogram(durationOf, count, m.Seconds, buckets, component, method)
}
