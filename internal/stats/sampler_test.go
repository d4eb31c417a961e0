package stats_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/stats"
)

func TestSamplerRate(t *testing.T) {
	s := stats.NewSampler(10)
	t0 := time.Now()
	for _, step := range []struct {
		what  string
		after time.Duration
		usage uint64
		rate  uint64
		ok    bool
	}{
		{"the first sample has no rate", 0, 1e9, 0, false},
		{"too soon for a rate", 100 * time.Millisecond, 2e9, 0, false},
		{"two seconds after the first, one more core-second", 2 * time.Second, 2e9, 5e8, true},
		{"too soon: the last rate stands", 2100 * time.Millisecond, 9e9, 5e8, true},
		{"idle", 4 * time.Second, 2e9, 0, true},
		{"usage went back: a new cgroup", 6 * time.Second, 1e6, 0, false},
		{"and its first rate", 7 * time.Second, 1e6 + 2e9, 2e9, true},
		{"the clock went back", time.Second, 1e6 + 3e9, 2e9, true},
	} {
		rate, ok := s.NanoCores("a", t0.Add(step.after), step.usage)
		if rate != step.rate || ok != step.ok {
			t.Errorf("%s: %d %v, want %d %v", step.what, rate, ok, step.rate, step.ok)
		}
	}
}

func TestSamplerForgets(t *testing.T) {
	s := stats.NewSampler(2)
	t0 := time.Now()
	known := func(key string) bool {
		_, ok := s.NanoCores(key, t0.Add(time.Minute), 1e9)
		return ok
	}
	s.NanoCores("a", t0, 0)
	s.NanoCores("b", t0, 0)
	s.NanoCores("a", t0, 0)
	s.NanoCores("c", t0, 0) // b was used longest ago
	if !known("a") || !known("c") {
		t.Error("a key in use was dropped")
	}
	if known("b") {
		t.Error("the sampler holds more keys than it may")
	}
	s.Forget("b")
	s.Forget("never seen")
	if known("b") {
		t.Error("a forgotten key has a rate")
	}
}

func TestSamplerFillsTheMessage(t *testing.T) {
	s := stats.NewSampler(10)
	f := stats.Figures{Time: time.Now()}
	if s.CPUUsage("a", f).UsageNanoCores != nil {
		t.Error("one moment has no rate")
	}
	f.Time, f.CPU = f.Time.Add(10*time.Second), 1e9
	u := s.CPUUsage("a", f)
	if u.UsageNanoCores.GetValue() != 1e8 || u.UsageCoreNanoSeconds.GetValue() != 1e9 || u.Timestamp != f.Time.UnixNano() {
		t.Errorf("message %v", u)
	}
}

func TestSamplerConcurrently(t *testing.T) {
	s := stats.NewSampler(8)
	t0 := time.Now()
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range 1000 {
				key := fmt.Sprint((i + worker) % 16)
				s.NanoCores(key, t0.Add(time.Duration(i)*time.Second), uint64(i))
				if i%7 == 0 {
					s.Forget(key)
				}
			}
		})
	}
	wg.Wait()
}
