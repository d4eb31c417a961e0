package cli

import (
	"errors"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// topSample is a node with two pods: after the first second, web has used 0.5 s of CPU and served 20 requests.
func topSample(second int64, last map[string]counters) ([]load, map[string]counters) {
	at := time.Unix(1000+second, 0)
	pods := []*runtimeapi.PodSandbox{
		{Id: "a", Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "shop"}, RuntimeHandler: "wasm",
			CreatedAt: time.Unix(900, 0).UnixNano()},
		{Id: "b", Metadata: &runtimeapi.PodSandboxMetadata{Name: "db", Namespace: "shop"}, State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY,
			CreatedAt: time.Unix(400, 0).UnixNano()},
	}
	stats := []*runtimeapi.PodSandboxStats{{
		Attributes: &runtimeapi.PodSandboxAttributes{Id: "a"},
		Linux: &runtimeapi.LinuxPodSandboxStats{
			Cpu:    &runtimeapi.CpuUsage{Timestamp: at.UnixNano(), UsageCoreNanoSeconds: &runtimeapi.UInt64Value{Value: uint64(second) * 5e8}},
			Memory: &runtimeapi.MemoryUsage{WorkingSetBytes: &runtimeapi.UInt64Value{Value: 2e6}},
		},
	}}
	return newLoads(pods, stats, map[string]float64{"a": float64(20 * second)}, last, at)
}

func TestTopRates(t *testing.T) {
	first, last := topSample(0, nil)
	if l := first[0]; l.cores != -1 || l.requests != -1 || l.memory != 2e6 {
		t.Errorf("first sample of web: got %+v, want memory and no rates", l)
	}
	second, last := topSample(1, last)
	if l := second[0]; l.cores != 0.5 || l.requests != 20 || l.traffic != 0 {
		t.Errorf("second sample of web: got %+v, want half a processor and 20 requests/s", l)
	}
	if l := second[1]; l.cores != -1 || l.ready {
		t.Errorf("second sample of db, which has no figures: got %+v, want no rates", l)
	}
	// Counters that go down belong to a restarted container.
	restarted, _ := topSample(0,
		map[string]counters{"a": {at: time.Unix(990, 0), cpu: last["a"].cpu, hasCPU: true, requests: 20, hasRequests: true}})
	if l := restarted[0]; l.cores != -1 || l.requests != -1 {
		t.Errorf("sample after a restart: got %+v, want no rates", l)
	}
}

func TestTopRequestTotals(t *testing.T) {
	metric := func(name string, v uint64) *runtimeapi.Metric {
		return &runtimeapi.Metric{Name: name, Value: &runtimeapi.UInt64Value{Value: v}}
	}
	got := requestTotals([]*runtimeapi.PodSandboxMetrics{
		{PodSandboxId: "a", ContainerMetrics: []*runtimeapi.ContainerMetrics{{Metrics: []*runtimeapi.Metric{metric("container_requests_total", 7),
			metric("container_threads", 3)}}}},
		{PodSandboxId: "b", ContainerMetrics: []*runtimeapi.ContainerMetrics{{Metrics: []*runtimeapi.Metric{metric("container_requests_total",
			0)}}}},
		{PodSandboxId: "c", ContainerMetrics: []*runtimeapi.ContainerMetrics{{Metrics: []*runtimeapi.Metric{metric("container_requests_total",
			0)}}}},
	}, []*runtimeapi.PodSandbox{{Id: "a", RuntimeHandler: "linux"}, {Id: "b", RuntimeHandler: "linux"}, {Id: "c", RuntimeHandler: "wasm"}})
	if want := map[string]float64{"a": 7, "c": 0}; !maps.Equal(got, want) {
		t.Errorf("request totals: got %v, want %v: those of components, and those that are counted", got, want)
	}
}

func TestTopOrders(t *testing.T) {
	loads := []load{
		{name: "b", runtime: "vm", cores: 1, memory: 1, created: time.Unix(1, 0), ready: true},
		{name: "a", runtime: "wasm", cores: 2, memory: 1, created: time.Unix(3, 0)},
		{name: "c", runtime: "linux", cores: -1, memory: 9, requests: 4, traffic: 5, created: time.Unix(2, 0), ready: true},
	}
	for name, want := range map[string]string{"cpu": "abc", "memory": "cab", "requests": "cab", "traffic": "cab", "name": "abc",
		"runtime": "cba", "state": "bca", "age": "acb"} {
		by, ok := orderNamed(name)
		if !ok {
			t.Fatalf("no order %q", name)
		}
		got := ""
		for _, l := range by.sorted(loads, false) {
			got += l.name
		}
		if got != want {
			t.Errorf("order by %s: got %s, want %s", name, got, want)
		}
	}
	if _, ok := orderNamed("color"); ok {
		t.Error("order by color: got one, want none")
	}
}

// TestTopView presses keys and looks at the screen.
func TestTopView(t *testing.T) {
	loads, _ := topSample(0, nil)
	cpu, _ := orderNamed("cpu")
	var m tea.Model = topModel{by: cpu}
	send := func(msg tea.Msg) (cmd tea.Cmd) {
		m, cmd = m.Update(msg)
		return cmd
	}
	screen := func() []string { return m.(topModel).lines(time.Unix(1000, 0)) }
	send(tea.WindowSizeMsg{Width: 60, Height: 4})
	if send(sampled{loads: loads}) == nil {
		t.Error("after a sample: got no command, want one for the next sample")
	}
	press := func(code rune) tea.Cmd { return send(tea.KeyPressMsg{Code: code, Text: string(code)}) }
	press('n')
	if lines := screen(); len(lines) != 4 || !strings.HasPrefix(lines[0], "2 pods, 1 ready") || len([]rune(lines[0])) > 60 ||
		!strings.HasPrefix(lines[3], "shop        db") {
		t.Errorf("screen of 4 lines sorted by name: got\n%s", strings.Join(lines, "\n"))
	}
	send(tea.KeyPressMsg{Code: tea.KeyDown})
	send(tea.KeyPressMsg{Code: tea.KeyDown})
	if lines := screen(); !strings.HasPrefix(lines[3], "shop        web") {
		t.Errorf("screen after scrolling past the end: got\n%s\nwant web last", strings.Join(lines, "\n"))
	}
	send(tea.KeyPressMsg{Code: tea.KeyPgUp})
	press('n')
	if lines := screen(); !strings.HasPrefix(lines[3], "shop        web") {
		t.Errorf("screen in reverse order: got\n%s\nwant web first", strings.Join(lines, "\n"))
	}
	send(sampled{err: errors.New("the node is away")})
	if lines := screen(); !strings.Contains(lines[0], "the node is away") || len(lines) != 4 {
		t.Errorf("screen after a failed sample: got\n%s\nwant the error and the old figures", strings.Join(lines, "\n"))
	}
	if cmd := press('q'); cmd == nil {
		t.Error("q: got no command, want the end")
	} else if _, ok := cmd().(tea.QuitMsg); !ok {
		t.Errorf("q: got %T, want the end", cmd())
	}
}

// TestTopWithoutMetrics: a runtime without metrics has no requests per second, and is seldom asked for them.
func TestTopWithoutMetrics(t *testing.T) {
	o := &otherRuntime{}
	serveRuntime(t, o)
	if out, err := runCommand(t, "top", "--once", "--interval", "100ms"); err != nil || !strings.Contains(out, "web") {
		t.Fatalf("top: got %q, error %v; want the pod", out, err)
	}
	client, err := Connect(t.Context(), os.Getenv(EndpointVariable), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close(t.Context())
	o.metrics.Store(0)
	s := &sampler{client: client}
	for range 1 + askAgain {
		if _, err := s.sample(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := o.metrics.Load(); n != 1 {
		t.Errorf("got %d requests for metrics, want one", n)
	}
	if _, err := s.sample(t.Context()); err != nil || o.metrics.Load() != 2 {
		t.Errorf("got %d requests for metrics, error %v; want that the runtime is asked again", o.metrics.Load(), err)
	}
}
