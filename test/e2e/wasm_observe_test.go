package e2e

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"

	"github.com/tripod-run/tripod/test/harness"
)

// TestWasmMetrics checks the metrics after a few calls, after a restart of the daemon, and after the removal of the
// pod.
func TestWasmMetrics(t *testing.T) {
	address := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.Set("metrics.address", address))
	series := func() map[string]string {
		resp, err := http.Get("http://" + address + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]string{}
		for line := range strings.Lines(string(text)) {
			if name, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && !strings.HasPrefix(line, "#") {
				all[name] = v
			}
		}
		return all
	}
	holds := func(want map[string]string) {
		t.Helper()
		harness.Eventually(t, waitLimit, func() error {
			all := series()
			for name, v := range want {
				if all[name] != v {
					return fmt.Errorf("metric %s: got %q, want %q; all are %v", name, all[name], v, all)
				}
			}
			return nil
		})
	}
	c, s := startComponent(t, d, harness.FaultsC, faults)
	for range 3 {
		s.call(faults+"/Echo", `{"data":"aGk="}`)
	}
	_, _ = s.try(s.context(), faults+"/Trap", `{}`)
	const component = `component="images.test:faults-c@1.0.0"`
	counted := map[string]string{
		`tripod_component_requests_total{code="OK",` + component + `,method="faults.v1.Faults/Echo"}`:       "3",
		`tripod_component_requests_total{code="INTERNAL",` + component + `,method="faults.v1.Faults/Trap"}`: "1",
		`tripod_component_request_duration_seconds_count{` + component + `,method="faults.v1.Faults/Echo"}`: "3",
		`tripod_component_guests_ended_total{cause="trap",` + component + `}`:                               "1",
	}
	holds(counted)
	holds(map[string]string{`tripod_pods{handler="wasm",state="Running"}`: "1", `tripod_component_containers{` + component + `}`: "1",
		`tripod_cri_calls_total{code="OK",method="RunPodSandbox"}`: "1"})
	d.Kill()
	d.Start()
	holds(counted) // the worker kept counting
	c.Pod.Stop()
	holds(map[string]string{`tripod_pods{handler="wasm",state="Killed"}`: "1", `tripod_component_containers{` + component + `}`: "0"})
	holds(counted)
}

// TestWasmTracing: the collector receives a request's span, whose parent is the caller's span.
func TestWasmTracing(t *testing.T) {
	sink, endpoint := startSpanSink(t)
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.Set("tracing.endpoint", endpoint))
	_, s := startComponent(t, d, harness.GreeterC, greeter)
	const traceID, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	ctx := metadata.AppendToOutgoingContext(s.context(), "traceparent", "00-"+traceID+"-"+parent+"-01")
	if _, err := s.try(ctx, greeter+"/SayHello", `{"name":"Ada"}`); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, waitLimit, func() error {
		span := sink.find(greeter + "/SayHello")
		if span == nil {
			return fmt.Errorf("found no span of the call among %v", sink.spans)
		}
		if got := hex.EncodeToString(span.TraceId) + " " + hex.EncodeToString(span.ParentSpanId); got != traceID+" "+parent {
			t.Errorf("trace and parent of the span: got %s, want %s %s", got, traceID, parent)
		}
		return nil
	})
}
