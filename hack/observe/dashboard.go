package main

import "encoding/json"

// panel is a graph of the dashboard.
type panel struct {
	title, unit string
	// queries maps legends to PromQL.
	queries map[string]string
}

type row struct {
	title  string
	panels []panel
}

// selected limits a query of containers to the variables of the dashboard.
const selected = `namespace=~"$namespace",pod=~"$pod",container!=""`

// rows are the rows of the dashboard.
var rows = []row{
	{"Node", []panel{
		{"Problems", "short", map[string]string{"{{problem}}: {{reason}}": `tripod_problem`}},
		{"Pods by handler and state", "short", map[string]string{"{{handler}} {{state}}": `sum by (handler, state) (tripod_pods)`}},
		{"CRI calls per second", "reqps", map[string]string{"{{method}}": `sum by (method) (rate(tripod_cri_calls_total[$__rate_interval]))`}},
		{"CRI calls that fail", "reqps", map[string]string{
			"{{method}} {{code}}": `sum by (method, code) (rate(tripod_cri_calls_total{code!="OK"}[$__rate_interval])) > 0`,
		}},
		{"CRI calls, 99th percentile", "s", map[string]string{
			"{{method}}": `histogram_quantile(0.99, sum by (method, le) (rate(tripod_cri_call_duration_seconds_bucket[$__rate_interval])))`,
		}},
		{"Memory and CPU of the daemon", "short", map[string]string{
			"resident bytes": `process_resident_memory_bytes{job="tripod"}`,
			"cores":          `rate(process_cpu_seconds_total{job="tripod"}[$__rate_interval])`,
		}},
		{"Connections", "short", map[string]string{"{{address}}": `sum by (address) (tripod_connections)`}},
		{"Panics that were survived", "short", map[string]string{"panics": `increase(tripod_recovered_panics_total[$__rate_interval])`}},
	}},
	{"Containers of every kind", []panel{
		{"CPU", "short", map[string]string{
			"{{namespace}}/{{pod}}/{{container}}": `sum by (namespace, pod, container) (rate(container_cpu_usage_seconds_total{` + selected +
				`}[$__rate_interval]))`,
		}},
		{"CPU throttled", "percentunit", map[string]string{
			"{{namespace}}/{{pod}}/{{container}}": `sum by (namespace, pod, container) (rate(container_cpu_cfs_throttled_periods_total{` + selected +
				`}[$__rate_interval])) / sum by (namespace, pod, container) (rate(container_cpu_cfs_periods_total{` + selected +
				`}[$__rate_interval]))`,
		}},
		{"Memory, working set", "bytes", map[string]string{
			"{{namespace}}/{{pod}}/{{container}}": `sum by (namespace, pod, container) (container_memory_working_set_bytes{` + selected + `})`,
		}},
		{"Memory, part of the limit", "percentunit", map[string]string{
			"{{namespace}}/{{pod}}/{{container}}": `sum by (namespace, pod, container) (container_memory_working_set_bytes{` + selected +
				`}) / sum by (namespace, pod, container) (container_spec_memory_limit_bytes{` + selected + `} > 0)`,
		}},
		{"Network received", "Bps", map[string]string{
			"{{namespace}}/{{pod}} {{interface}}": `sum by (namespace, pod, interface) (rate(container_network_receive_bytes_total{namespace=~"$namespace",pod=~"$pod"}[$__rate_interval]))`,
		}},
		{"Network sent", "Bps", map[string]string{
			"{{namespace}}/{{pod}} {{interface}}": `sum by (namespace, pod, interface) (rate(container_network_transmit_bytes_total{namespace=~"$namespace",pod=~"$pod"}[$__rate_interval]))`,
		}},
		{"Disk reads and writes", "Bps", map[string]string{
			"{{namespace}}/{{pod}}/{{container}} read": `sum by (namespace, pod, container) (rate(container_fs_reads_bytes_total{` + selected +
				`}[$__rate_interval]))`,
			"{{namespace}}/{{pod}}/{{container}} write": `sum by (namespace, pod, container) (rate(container_fs_writes_bytes_total{` + selected +
				`}[$__rate_interval]))`,
		}},
		{"Disk usage", "bytes", map[string]string{
			"{{namespace}}/{{pod}}/{{container}} {{device}}": `sum by (namespace, pod, container, device) (container_fs_usage_bytes{` + selected +
				`})`,
		}},
		{"Waiting for CPU, memory and I/O", "percentunit", map[string]string{
			"{{pod}}/{{container}} CPU": `sum by (pod, container) (rate(container_pressure_cpu_waiting_seconds_total{` + selected +
				`}[$__rate_interval]))`,
			"{{pod}}/{{container}} memory": `sum by (pod, container) (rate(container_pressure_memory_waiting_seconds_total{` + selected +
				`}[$__rate_interval]))`,
			"{{pod}}/{{container}} I/O": `sum by (pod, container) (rate(container_pressure_io_waiting_seconds_total{` + selected +
				`}[$__rate_interval]))`,
		}},
		{"Killed for lack of memory", "short", map[string]string{
			"{{namespace}}/{{pod}}/{{container}}": `sum by (namespace, pod, container) (increase(container_oom_events_total{` + selected +
				`}[$__rate_interval])) > 0`,
		}},
	}},
	{"Components", []panel{
		{"Requests per second", "reqps", map[string]string{
			"{{component}} {{code}}": `sum by (component, code) (rate(tripod_component_requests_total[$__rate_interval]))`,
		}},
		{"Requests, 99th percentile", "s", map[string]string{
			"{{component}} {{method}}": `histogram_quantile(0.99, sum by (component, method, le) (rate(tripod_component_request_duration_seconds_bucket[$__rate_interval])))`,
		}},
		{"Memory of guests", "bytes", map[string]string{"{{component}}": `sum by (component) (tripod_component_memory_bytes)`}},
		{"Guests that were ended", "short", map[string]string{
			"{{component}} {{cause}}": `sum by (component, cause) (increase(tripod_component_guests_ended_total[$__rate_interval])) > 0`,
		}},
	}},
	{"Modules over MQTT", []panel{
		{"Connected to the broker", "short", map[string]string{"{{instance}}": `tripod_edge_broker_connected`}},
		{"Modules that ended", "short",
			map[string]string{"{{reason}}": `sum by (reason) (increase(tripod_edge_exited_modules_total[$__rate_interval]))`}},
		{"Messages that were dropped", "short",
			map[string]string{"{{reason}}": `sum by (reason) (rate(tripod_edge_dropped_messages_total[$__rate_interval]))`}},
		{"Records of the orchestrator", "short", map[string]string{"{{type}} {{status}}": `tripod_orchestrator_records`}},
	}},
}

type object = map[string]any

// dashboard returns the dashboard in Grafana's JSON.
func dashboard() ([]byte, error) {
	const width, height = 12, 8
	var panels []object
	id, y := 0, 0
	for _, r := range rows {
		id++
		panels = append(panels,
			object{"id": id, "type": "row", "title": r.title, "collapsed": false, "panels": []any{},
				"gridPos": object{"x": 0, "y": y, "w": 2 * width, "h": 1}})
		y++
		for i, p := range r.panels {
			id++
			panels = append(panels, p.graph(id, object{"x": i % 2 * width, "y": y + i/2*height, "w": width, "h": height}))
		}
		y += (len(r.panels) + 1) / 2 * height
	}
	text, err := json.MarshalIndent(object{
		"uid": "tripod", "title": "Tripod", "tags": []string{"tripod"}, "schemaVersion": 39, "version": 1, "editable": true, "refresh": "30s",
		"time": object{"from": "now-1h", "to": "now"}, "panels": panels, "annotations": object{"list": []any{}},
		"templating": object{"list": []object{
			{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
			variable("namespace", `label_values(container_last_seen, namespace)`),
			variable("pod", `label_values(container_last_seen{namespace=~"$namespace"}, pod)`),
		}},
	}, "", "  ")
	return append(text, '\n'), err
}

var source = object{"type": "prometheus", "uid": "${datasource}"}

func variable(name, query string) object {
	return object{
		"name": name, "type": "query", "datasource": source, "query": object{"query": query, "refId": name}, "definition": query,
		"refresh": 2, "includeAll": true, "multi": true, "allValue": ".*", "current": object{"text": "All", "value": "$__all"}, "sort": 1,
	}
}

func (p panel) graph(id int, at object) object {
	var targets []object
	for i, legend := range sortedKeys(p.queries) {
		targets = append(targets, object{"refId": string(rune('A' + i)), "datasource": source, "expr": p.queries[legend], "legendFormat": legend})
	}
	return object{
		"id": id, "type": "timeseries", "title": p.title, "datasource": source, "gridPos": at, "targets": targets,
		"fieldConfig": object{"defaults": object{"unit": p.unit, "min": 0}, "overrides": []any{}},
		"options":     object{"legend": object{"displayMode": "list", "placement": "bottom"}, "tooltip": object{"mode": "multi", "sort": "desc"}},
	}
}
