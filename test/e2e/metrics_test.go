package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// The metrics that Kubernetes 1.37 expects of a runtime, by what they need.
var (
	networkMetrics = []string{
		"container_network_receive_bytes_total", "container_network_receive_errors_total", "container_network_receive_packets_dropped_total",
		"container_network_receive_packets_total", "container_network_transmit_bytes_total", "container_network_transmit_errors_total",
		"container_network_transmit_packets_dropped_total", "container_network_transmit_packets_total",
	}
	// knownMetrics are known of every container, whatever its kind.
	knownMetrics = []string{
		"container_cpu_cfs_throttled_seconds_total", "container_cpu_usage_seconds_total", "container_file_descriptors", "container_last_seen",
		"container_memory_max_usage_bytes", "container_memory_rss", "container_memory_usage_bytes", "container_memory_working_set_bytes",
		"container_oom_events_total", "container_sockets", "container_spec_cpu_period", "container_spec_cpu_quota",
		"container_spec_cpu_shares", "container_spec_memory_limit_bytes", "container_spec_memory_reservation_limit_bytes",
		"container_spec_memory_swap_limit_bytes", "container_start_time_seconds",
	}
	// cgroupMetrics need a cgroup that contains nothing else.
	cgroupMetrics = []string{
		"container_cpu_cfs_periods_total", "container_cpu_cfs_throttled_periods_total", "container_cpu_system_seconds_total",
		"container_cpu_user_seconds_total", "container_memory_cache", "container_memory_failcnt", "container_memory_failures_total",
		"container_memory_kernel_usage", "container_memory_mapped_file", "container_memory_swap", "container_processes", "container_threads",
		"container_threads_max", "container_ulimits_soft",
	}
	// diskMetrics need a writable file system.
	diskMetrics = []string{"container_fs_inodes_free", "container_fs_inodes_total", "container_fs_limit_bytes", "container_fs_usage_bytes"}
	// ioMetrics need a block device that counts by cgroup.
	ioMetrics = []string{
		"container_blkio_device_usage_total", "container_fs_reads_bytes_total", "container_fs_reads_total", "container_fs_writes_bytes_total",
		"container_fs_writes_total",
	}
	// kernelMetrics need pressure accounting, and a cgroup controller for huge pages.
	kernelMetrics = []string{
		"container_hugetlb_max_usage_bytes", "container_hugetlb_usage_bytes", "container_pressure_cpu_stalled_seconds_total",
		"container_pressure_cpu_waiting_seconds_total", "container_pressure_io_stalled_seconds_total",
		"container_pressure_io_waiting_seconds_total",
		"container_pressure_memory_stalled_seconds_total", "container_pressure_memory_waiting_seconds_total",
	}
)

// criMetrics converts metrics as a kubelet does for /metrics/cadvisor, and reports to the registry whatever a kubelet
// would drop.
type criMetrics struct {
	descs map[string]*prometheus.Desc
	pods  []*runtimeapi.PodSandboxMetrics
}

func (c *criMetrics) Describe(to chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		to <- d
	}
}

func (c *criMetrics) Collect(to chan<- prometheus.Metric) {
	put := func(metrics []*runtimeapi.Metric) {
		for _, m := range metrics {
			desc, kind := c.descs[m.Name], prometheus.CounterValue
			if m.MetricType == runtimeapi.MetricType_GAUGE {
				kind = prometheus.GaugeValue
			}
			if desc == nil {
				desc = prometheus.NewDesc(m.Name, "not described", nil, nil)
			}
			metric, err := prometheus.NewConstMetric(desc, kind, float64(m.GetValue().GetValue()), m.LabelValues...)
			if err != nil {
				metric = prometheus.NewInvalidMetric(desc, fmt.Errorf("%s: %w", m.Name, err))
			}
			to <- metric
		}
	}
	for _, p := range c.pods {
		put(p.Metrics)
		for _, container := range p.ContainerMetrics {
			put(container.Metrics)
		}
	}
}

// gather returns the daemon's metrics, converted, by name. It fails the test if a kubelet would drop one of them.
func gather(t *testing.T, d *harness.Daemon) map[string]*dto.MetricFamily {
	t.Helper()
	descriptors, err := d.Runtime().ListMetricDescriptors(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	pods, err := d.Runtime().ListPodSandboxMetrics(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	all := &criMetrics{descs: map[string]*prometheus.Desc{}, pods: pods}
	for _, m := range descriptors {
		all.descs[m.Name] = prometheus.NewDesc(m.Name, m.Help, m.LabelKeys, nil)
	}
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(all); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Error(err)
	}
	byName := map[string]*dto.MetricFamily{}
	for _, f := range families {
		byName[f.GetName()] = f
	}
	return byName
}

// valuesOf returns the values of a container or pod, by series: the name and the labels that are not the same for all.
func valuesOf(families map[string]*dto.MetricFamily, id string) map[string]float64 {
	values := map[string]float64{}
	for name, f := range families {
		for _, m := range f.Metric {
			series, found := name, false
			for _, l := range m.Label {
				switch l.GetName() {
				case "id":
					found = l.GetValue() == id
				case "pod", "namespace", "container", "image", "name":
				default:
					series += "," + l.GetName() + "=" + l.GetValue()
				}
			}
			if found {
				values[series] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return values
}

// checkMetrics checks that a container has the given metrics with correct labels, that its pod has those of its network,
// and that no counter goes down.
func checkMetrics(t *testing.T, d *harness.Daemon, c *harness.Container, want ...[]string) map[string]float64 {
	t.Helper()
	families := gather(t, d)
	first := valuesOf(families, c.ID)
	has := func(name string, values map[string]float64) bool {
		for series := range values {
			if series == name || strings.HasPrefix(series, name+",") {
				return true
			}
		}
		return false
	}
	for _, name := range slices.Concat(want...) {
		if !has(name, first) {
			t.Errorf("metric %s of %s is missing", name, c.ID)
		}
	}
	pod := valuesOf(families, c.Pod.ID)
	for _, name := range networkMetrics {
		if !has(name, pod) {
			t.Errorf("metric %s of pod %s is missing", name, c.Pod.ID)
		}
	}
	status := c.Status()
	for _, m := range families["container_memory_working_set_bytes"].GetMetric() {
		labels := map[string]string{}
		for _, l := range m.Label {
			labels[l.GetName()] = l.GetValue()
		}
		if labels["id"] != c.ID {
			continue
		}
		meta := c.Pod.Config.GetMetadata()
		if labels["pod"] != meta.GetName() || labels["namespace"] != meta.GetNamespace() ||
			labels["container"] != status.GetMetadata().GetName() ||
			labels["name"] != c.ID || labels["image"] != c.Config.GetImage().GetImage() {
			t.Errorf("labels: got %v, want those of pod %v and container %v", labels, meta, status)
		}
	}
	families = gather(t, d)
	second := valuesOf(families, c.ID)
	for series, v := range first {
		name, _, _ := strings.Cut(series, ",")
		if families[name].GetType() == dto.MetricType_COUNTER && second[series] < v {
			t.Errorf("counter %s: got %v after %v", series, second[series], v)
		}
	}
	return first
}

// checkDescribed checks that a container and its pod report exactly those of the described metrics that its kind of pod has
// (docs/metrics.md), and no others. Some need something of the host and are not compared.
func checkDescribed(t *testing.T, d *harness.Daemon, c *harness.Container, has func(name string) bool) {
	t.Helper()
	descriptors, err := d.Runtime().ListMetricDescriptors(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	reported := map[string]bool{}
	families := gather(t, d) // fails the test if a metric is reported and not described
	for _, values := range []map[string]float64{valuesOf(families, c.ID), valuesOf(families, c.Pod.ID)} {
		for series := range values {
			name, _, _ := strings.Cut(series, ",")
			reported[name] = true
		}
	}
	optional := slices.Concat(ioMetrics, kernelMetrics)
	for _, m := range descriptors {
		if want := has(m.Name); reported[m.Name] != want && !slices.Contains(optional, m.Name) {
			t.Errorf("%s of %s: reported %v, want %v", m.Name, c.ID, reported[m.Name], want)
		}
	}
}

// except returns whether a metric is none of these.
func except(names ...string) func(name string) bool {
	return func(name string) bool { return !slices.Contains(names, name) }
}

// hostMetrics returns those metrics of kernelMetrics that this host has.
func hostMetrics(t *testing.T, c *harness.Container) (names []string) {
	t.Helper()
	for _, name := range kernelMetrics {
		if strings.HasPrefix(name, "container_hugetlb") {
			if _, err := os.Stat("/sys/fs/cgroup/hugetlb"); err == nil {
				names = append(names, name)
			}
		} else if matches, _ := filepath.Glob("/sys/fs/cgroup/unified" + cgroupOf(t, c, "memory") + "/cpu.pressure"); len(matches) > 0 {
			names = append(names, name)
		}
	}
	return names
}

func TestMetrics(t *testing.T) {
	address := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	d := harness.StartDaemon(t, harness.Set("metrics.address", address))
	limits := resources(&runtimeapi.LinuxContainerResources{
		CpuPeriod: 100_000, CpuQuota: 20_000, CpuShares: 1024, MemoryLimitInBytes: 64 << 20, MemorySwapLimitInBytes: 64 << 20,
	})
	t.Run("runtime should support returning metrics descriptors [Conformance]", func(t *testing.T) {
		descriptors, err := d.Runtime().ListMetricDescriptors(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		named := map[string]bool{}
		for _, m := range descriptors {
			if m.Help == "" || len(m.LabelKeys) == 0 || named[m.Name] {
				t.Errorf("descriptor: got %v, want one with a help text and labels for each name", m)
			}
			named[m.Name] = true
		}
		for _, name := range slices.Concat(networkMetrics, knownMetrics, cgroupMetrics, diskMetrics, ioMetrics, kernelMetrics) {
			if !named[name] {
				t.Errorf("descriptor of %s is missing", name)
			}
		}
	})
	t.Run("runtime should support listing pod sandbox metrics [Conformance]", func(t *testing.T) {
		c := sleeper(t, d, limits)
		c.Must("sh", "-c", "for i in 1 2 3; do echo hi >/file$i; done; sync; i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")
		values := checkMetrics(t, d, c, knownMetrics, cgroupMetrics, diskMetrics, hostMetrics(t, c))
		checkDescribed(t, d, c, except())
		for series, want := range map[string]float64{
			"container_spec_cpu_period": 100_000, "container_spec_cpu_quota": 20_000, "container_spec_cpu_shares": 1024,
			"container_spec_memory_limit_bytes": 64 << 20, "container_spec_memory_swap_limit_bytes": 64 << 20, "container_memory_failcnt": 0,
			"container_oom_events_total": 0, "container_threads": values["container_processes"],
		} {
			if got, ok := values[series]; !ok || got != want {
				t.Errorf("%s: got %v, want %v", series, got, want)
			}
		}
		for _, series := range []string{
			"container_cpu_cfs_throttled_periods_total", "container_memory_working_set_bytes", "container_processes", "container_file_descriptors",
			"container_ulimits_soft,ulimit=max_open_files", "container_memory_failures_total,failure_type=pgfault,scope=container",
		} {
			if values[series] == 0 {
				t.Errorf("%s: got 0, want more", series)
			}
		}
	})
	t.Run("the stream has what the list has", func(t *testing.T) {
		c := sleeper(t, d)
		stream, err := d.CRI().StreamPodSandboxMetrics(t.Context(), &runtimeapi.StreamPodSandboxMetricsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var containers []string
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range m.PodSandboxMetrics {
				for _, of := range p.ContainerMetrics {
					containers = append(containers, of.ContainerId)
				}
			}
		}
		if !slices.Contains(containers, c.ID) {
			t.Errorf("containers in the stream: got %v, want %s among them", containers, c.ID)
		}
	})
	t.Run("the daemon serves them with fractions of seconds", func(t *testing.T) {
		c := sleeper(t, d)
		resp, err := http.Get("http://" + address + "/metrics/cadvisor")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "container_cpu_usage_seconds_total{") && strings.Contains(line, `id="`+c.ID+`"`) &&
				strings.Contains(line, "} 0.") {
				return
			}
		}
		t.Errorf("GET /metrics/cadvisor: got\n%s\nwant container_cpu_usage_seconds_total of %s, less than a second", text, c.ID)
	})
	t.Run("a stopped pod has none", func(t *testing.T) {
		c := sleeper(t, d)
		c.Pod.Stop()
		if values := valuesOf(gather(t, d), c.ID); len(values) > 0 {
			t.Errorf("metrics of a stopped container: got %v, want none", values)
		}
	})
}
