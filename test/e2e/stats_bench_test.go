package e2e

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// BenchmarkPodStats asks a node with 100 pods for their statistics and metrics. In the sub-benchmarks “measured”, every
// call measures; in “shared”, calls share measurements as by default. The metric cpu-ms/op is the daemon's CPU time per
// call, which other load on the machine does not change.
func BenchmarkPodStats(b *testing.B) {
	for name, interval := range map[string]string{"measured": "0s", "shared": "500ms"} {
		b.Run(name, func(b *testing.B) { benchmarkPodStats(b, interval) })
	}
}

func benchmarkPodStats(b *testing.B, interval string) {
	d := harness.StartDaemon(b, harness.Set("node.stats_interval", interval))
	d.Pull(b, harness.Busybox)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 25 {
				p := d.RunPod(b, harness.PodConfig(b, fmt.Sprintf("p%d-%d", i, j)))
				p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
			}
		})
	}
	wg.Wait()
	for call, do := range map[string]func() (int, error){
		"ListPodSandboxStats": func() (int, error) {
			r, err := d.CRI().ListPodSandboxStats(b.Context(), &runtimeapi.ListPodSandboxStatsRequest{})
			return len(r.GetStats()), err
		},
		"ListContainerStats": func() (int, error) {
			r, err := d.CRI().ListContainerStats(b.Context(), &runtimeapi.ListContainerStatsRequest{})
			return len(r.GetStats()), err
		},
		"ListPodSandboxMetrics": func() (int, error) {
			r, err := d.CRI().ListPodSandboxMetrics(b.Context(), &runtimeapi.ListPodSandboxMetricsRequest{})
			return len(r.GetPodMetrics()), err
		},
	} {
		b.Run(call, func(b *testing.B) {
			before := cpuTime(b, d.Pid())
			for b.Loop() {
				if n, err := do(); n != 100 || err != nil {
					b.Fatalf("%s: got %d of 100, error %v", call, n, err)
				}
			}
			b.ReportMetric(float64((cpuTime(b, d.Pid())-before).Milliseconds())/float64(b.N), "cpu-ms/op")
		})
	}
}

// cpuTime returns the CPU time that a process has used.
func cpuTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Fatal(err)
	}
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	var ticks [2]int64
	for i := range ticks {
		if _, err := fmt.Sscan(fields[11+i], &ticks[i]); err != nil {
			b.Fatal(err)
		}
	}
	const tick = 10 * time.Millisecond
	return time.Duration(ticks[0]+ticks[1]) * tick
}
