package collector

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// series returns the exported time series.
func series(t *testing.T, registry *prometheus.Registry) map[string]string {
	t.Helper()
	w := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("GET /metrics = %d: %s", w.Code, w.Body)
	}
	found := map[string]string{}
	for line := range strings.Lines(w.Body.String()) {
		if name, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && !strings.HasPrefix(line, "#") {
			found[name] = v
		}
	}
	return found
}

func workload(id string, requests uint64, memory uint64) Workload {
	return Workload{
		Metrics: workerapi.Metrics{ID: id, Component: "example.com:foo.Bar@1.2.3", Methods: []workerapi.MethodMetrics{{
			Procedure: "/foo.Bar/Do", InFlight: 1, ReceivedBytes: 10 * requests, Codes: map[string]uint64{"OK": requests - 1, "INTERNAL": 1},
			Bounds: []float64{.01, .1}, Buckets: []uint64{requests - 2, 1, 1}, Seconds: 1.5,
		}}},
		Stats: workerapi.Stats{ID: id, Requests: requests, Traps: 1, CPUNanos: requests * 1e9, MemoryBytes: memory, Instances: 2},
	}
}

// TestComponentsAddUp checks that a component's counters continue when containers are added, removed and restarted, and
// that gauges are current.
func TestComponentsAddUp(t *testing.T) {
	var now []Workload
	running := map[string][]string{}
	registry := prometheus.NewRegistry()
	registry.MustRegister(&Components{List: func(context.Context) []Workload { return now },
		Running: func() map[string][]string { return running }})
	const labels = `component="example.com:foo.Bar@1.2.3"`
	check := func(what, memory, ok, count, first string) {
		t.Helper()
		t.Log(what)
		got := series(t, registry)
		for name, v := range map[string]string{
			`tripod_component_memory_bytes{` + labels + `}`:                                                  memory,
			`tripod_component_requests_total{code="OK",` + labels + `,method="foo.Bar/Do"}`:                  ok,
			`tripod_component_request_duration_seconds_count{` + labels + `,method="foo.Bar/Do"}`:            count,
			`tripod_component_request_duration_seconds_bucket{` + labels + `,method="foo.Bar/Do",le="0.01"}`: first,
		} {
			if got[name] != v {
				t.Errorf("%s = %q, want %q", name, got[name], v)
			}
		}
	}
	now = []Workload{workload("a", 10, 100), workload("b", 5, 50)}
	check("two containers", "150", "13", "15", "11")
	now = []Workload{workload("a", 12, 100)}
	check("one was removed", "100", "15", "17", "13")
	now = []Workload{workload("a", 4, 30)}
	check("the other has restarted", "30", "18", "21", "15")
	now = nil
	check("all were removed", "0", "18", "21", "15")
	check("collected again", "0", "18", "21", "15")
	if got := series(t, registry)[`tripod_component_requests_in_flight{`+labels+`,method="foo.Bar/Do"}`]; got != "0" {
		t.Errorf("requests in flight of removed containers = %s, want 0", got)
	}
}
