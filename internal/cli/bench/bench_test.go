package bench

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestPercentile(t *testing.T) {
	var all []time.Duration
	for i := range 100 {
		all = append(all, time.Duration(100-i)*time.Millisecond)
	}
	f := figureOf("x", all)
	if f.N != 100 || f.P50 != 50 || f.P95 != 95 || f.Max != 100 {
		t.Errorf("figureOf(1 … 100 ms) = %+v", f)
	}
	if f = figureOf("x", all[:1]); f.P50 != 100 || f.P95 != 100 {
		t.Errorf("figureOf(100 ms) = %+v, want 100 ms everywhere", f)
	}
}

func TestRecorderLeavesFailuresOut(t *testing.T) {
	r := newRecorder()
	_ = r.time("b", func() error { return nil })
	_ = r.time("a", func() error { return nil })
	_ = r.time("a", func() error { return errors.New("failed") })
	figures := r.figures()
	r.add("b", time.Second)
	r.add("b", time.Second)
	if r.count("b") != 3 || r.total("b") < 2*time.Second || r.count("c") != 0 {
		t.Errorf("got %d calls of b in %s, want 3 in at least 2 s and no call of c", r.count("b"), r.total("b"))
	}
	if len(figures) != 2 || figures[0].Call != "b" || figures[1].N != 1 {
		t.Errorf("figures: got %+v, want b and one other", figures)
	}
}

func TestParallel(t *testing.T) {
	var now, most, done atomic.Int64
	err := parallel(t.Context(), 4, 50, func(int) error {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		done.Add(1)
		return nil
	})
	if err != nil || done.Load() != 50 || most.Load() > 4 {
		t.Errorf("parallel: got %v, %d calls, %d at a time; want 50 calls, at most 4 at a time", err, done.Load(), most.Load())
	}
	stop := errors.New("stop")
	done.Store(0)
	err = parallel(context.Background(), 1, 50, func(i int) error {
		done.Add(1)
		if i == 3 {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || done.Load() != 4 {
		t.Errorf("parallel: got %v after %d calls, want the first error after 4", err, done.Load())
	}
}

// TestHelpersAreNewProcesses starts a process and finds it with its memory, and no earlier process.
func TestHelpersAreNewProcesses(t *testing.T) {
	before, err := processes("/proc")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("sleep", "60")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	m, err := helpers("/proc", before, 1)
	if err != nil || m.Helpers["sleep"] < 1 || m.HelperPSS <= 0 {
		t.Errorf("helpers = %+v, %v; want the new process sleep", m, err)
	}
	if pss("/proc", os.Getpid()) < 1<<20 {
		t.Error("pss of this process is less than a MiB")
	}
	now, err := processes("/proc")
	if err != nil {
		t.Fatal(err)
	}
	if m, err = helpers("/proc", now, 1); err != nil || m.Helpers["sleep"] != 0 {
		t.Errorf("helpers = %+v, %v; want no process that existed before", m, err)
	}
}

func TestMarkdown(t *testing.T) {
	report := func(name string, p50 float64) *Report {
		return &Report{Runtime: name, Network: "CNI", ListPods: 3, ListUp: 1.25, ListDaemons: 60 << 20,
			Lists: []Figure{{Call: "ListPodSandbox", P50: p50}},
			Rounds: []Round{{Parallel: 1, Pods: 30, PodsPerSecond: 5, Figures: []Figure{{Call: "RunPodSandbox", P50: p50, P95: 2 * p50}},
				Memory: Memory{HelperPSS: 1 << 20, DaemonGrowth: 1 << 19, Helpers: map[string]int{"conmon": 30}}}}}
	}
	var out bytes.Buffer
	if err := Markdown(&out, []*Report{report("a", 50), report("b", 100)}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"### 30 pods, 1 at a time (network: CNI)", "| p50 / p95 in ms | a | b | last : first |",
		"| RunPodSandbox | 50.0 / 100.0 | 100.0 / 200.0 | 2.00 |", "1.00 MiB (30 conmon)", "0.50 MiB", "with 3 pods",
		"| all pods running after | 1.2 s | 1.2 s | |", "| daemons' memory (PSS) | 60 MiB | 60 MiB | |"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("Markdown does not contain %q:\n%s", want, out.String())
		}
	}
}

func TestSumMappings(t *testing.T) {
	smaps := `7f0000000000-7f0004000000 rw-s 00000000 00:01 5 /memfd:ram (deleted)
Size:              65536 kB
Rss:               20000 kB
Pss:               20000 kB
Pss_Dirty:         20000 kB
7f0005000000-7f0005001000 r-xp 00000000 00:01 6 /usr/bin/qemu
Size:                  4 kB
Pss:                   2 kB
VmFlags: rd ex
`
	for guest, want := range map[int64]int64{0: 20002 << 10, 64 << 20: 2 << 10, 4 << 10: 20000 << 10} {
		if got := sumMappings(strings.NewReader(smaps), guest); got != want {
			t.Errorf("PSS without a guest of %d bytes: got %d, want %d", guest, got, want)
		}
	}
}

// TestCPUTime: a process that computes has used CPU time, and one that does not exist has used none.
func TestCPUTime(t *testing.T) {
	until := time.Now().Add(time.Minute)
	for cpuTime("/proc", []int{os.Getpid()}) == 0 && time.Now().Before(until) {
		_ = strings.Repeat("x", 1<<20)
	}
	if got := cpuTime("/proc", []int{os.Getpid()}); got <= 0 {
		t.Errorf("CPU time of this process: got %s, want more than 0", got)
	}
	if got := cpuTime("/proc", []int{1 << 30}); got != 0 {
		t.Errorf("CPU time of a missing process: got %s, want 0", got)
	}
}
