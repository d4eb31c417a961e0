package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// alert is an alert rule. after is how long the query must have a result.
type alert struct{ name, query, after, severity, summary string }

// groups are the alert rules, by group.
var groups = map[string][]alert{
	"tripod-node": {
		{"TripodDown", `up{job="tripod"} == 0`, "5m", "critical",
			"The daemon on {{ $labels.instance }} cannot be scraped. Pods keep running; run `tripod check` there."},
		{"TripodProblem", `tripod_problem == 1`, "5m", "warning",
			"{{ $labels.instance }} has the problem {{ $labels.problem }}: {{ $labels.reason }}."},
		{"TripodPanic", `increase(tripod_recovered_panics_total[15m]) > 0`, "", "warning",
			"The daemon on {{ $labels.instance }} survived a panic, which is a defect. The log has the stack: please report it."},
		{"TripodCallsFail", `sum by (instance, method, code) (rate(tripod_cri_calls_total{code=~"Internal|Unknown|DataLoss"}[10m])) > 0`, "10m",
			"warning",
			"{{ $labels.method }} on {{ $labels.instance }} answers {{ $labels.code }}."},
		{"TripodListsSlow", `histogram_quantile(0.99, sum by (instance, method, le) (rate(tripod_cri_call_duration_seconds_bucket{method=~"ListPodSandbox|ListContainers|Status|PodSandboxStatus|ContainerStatus"}[10m]))) > 1`,
			"10m", "warning", "One of a hundred calls of {{ $labels.method }} on {{ $labels.instance }} takes {{ $value | humanizeDuration }}. A kubelet becomes NotReady after 3 minutes."},
		{"TripodConnectionsRefused", `sum by (instance, address, reason) (rate(tripod_connections_rejected_total[10m])) > 1`, "10m", "warning",
			"{{ $labels.instance }} refuses connections to {{ $labels.address }} ({{ $labels.reason }}): see [connections] in the configuration."},
		{"TripodSpansDropped", `increase(tripod_span_batches_dropped_total[15m]) > 0`, "15m", "info",
			"{{ $labels.instance }} cannot send its spans to the collector."},
	},
	"tripod-containers": {
		{"ContainerKilledForMemory", `sum by (namespace, pod, container) (increase(container_oom_events_total{container!=""}[10m])) > 0`, "",
			"warning",
			"A process of {{ $labels.namespace }}/{{ $labels.pod }}/{{ $labels.container }} was killed for lack of memory."},
		{"ContainerMemoryNearLimit",
			`max by (namespace, pod, container) (container_memory_working_set_bytes{container!=""}) / max by (namespace, pod, container) (container_spec_memory_limit_bytes{container!=""} > 0) > 0.95`,
			"10m", "warning", "{{ $labels.namespace }}/{{ $labels.pod }}/{{ $labels.container }} uses {{ $value | humanizePercentage }} of its memory limit."},
		{"ContainerThrottled",
			`sum by (namespace, pod, container) (rate(container_cpu_cfs_throttled_periods_total{container!=""}[10m])) / sum by (namespace, pod, container) (rate(container_cpu_cfs_periods_total{container!=""}[10m])) > 0.5`,
			"15m", "info", "{{ $labels.namespace }}/{{ $labels.pod }}/{{ $labels.container }} waits for CPU quota in {{ $value | humanizePercentage }} of the periods."},
		{"ContainerDiskFull", `max by (namespace, pod, container, device) (container_fs_usage_bytes{container!=""}) / max by (namespace, pod, container, device) (container_fs_limit_bytes{container!=""} > 0) > 0.9`,
			"10m", "warning", "{{ $labels.device }} of {{ $labels.namespace }}/{{ $labels.pod }}/{{ $labels.container }} is {{ $value | humanizePercentage }} full."},
	},
	"tripod-components": {
		{"ComponentFails", `sum by (component) (rate(tripod_component_requests_total{code=~"INTERNAL|UNKNOWN|UNAVAILABLE|DEADLINE_EXCEEDED|5.."}[5m])) / sum by (component) (rate(tripod_component_requests_total[5m])) > 0.05`,
			"10m", "warning", "{{ $value | humanizePercentage }} of the requests to {{ $labels.component }} fail."},
		{"ComponentGuestsEnded", `sum by (component, cause) (increase(tripod_component_guests_ended_total[10m])) > 10`, "", "warning",
			"{{ $value }} guests of {{ $labels.component }} were ended ({{ $labels.cause }}) in 10 minutes."},
		{"ComponentLogDropped", `increase(tripod_component_log_dropped_bytes_total[10m]) > 0`, "", "info",
			"Output of {{ $labels.component }} could not be logged."},
	},
	"tripod-edge": {
		{"ManagerDisconnected", `tripod_edge_broker_connected == 0`, "5m", "critical",
			"The manager on {{ $labels.instance }} has no connection to its broker. Modules keep running."},
		{"OrchestratorDisconnected", `tripod_orchestrator_broker_connected == 0`, "5m", "critical",
			"The orchestrator has no connection to its broker."},
		{"ModulesRestart", `tripod_orchestrator_restarts_pending > 0`, "15m", "warning", "{{ $value }} modules wait to be created again."},
		{"EdgeMessagesDropped", `sum by (instance, reason) (rate(tripod_edge_dropped_messages_total[10m])) > 1`, "10m", "warning",
			"{{ $labels.instance }} drops messages: {{ $labels.reason }}."},
	},
}

// alertRules returns the rules as a rule file of Prometheus.
func alertRules() ([]byte, error) {
	var b strings.Builder
	b.WriteString("# Alert rules for Prometheus, written by hack/observe. The job of the daemons must be named tripod.\ngroups:\n")
	for _, group := range sortedKeys(groups) {
		fmt.Fprintf(&b, "  - name: %s\n    rules:\n", group)
		for _, a := range groups[group] {
			fmt.Fprintf(&b, "      - alert: %s\n        expr: %s\n", a.name, quote(a.query))
			if a.after != "" {
				fmt.Fprintf(&b, "        for: %s\n", a.after)
			}
			fmt.Fprintf(&b, "        labels:\n          severity: %s\n        annotations:\n          summary: %s\n", a.severity, quote(a.summary))
		}
	}
	return []byte(b.String()), nil
}

// quote quotes a text for YAML.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
