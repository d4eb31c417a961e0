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
			t.Errorf("%s: NanoCores = %d, %v, want %d, %v", step.what, rate, ok, step.rate, step.ok)
		}
	}
}

func TestSamplerForgets(t *testing.T) {
	s := stats.NewSampler(2)
	t0 := time.Now()
	hasSample := func(key string) bool {
		_, ok := s.NanoCores(key, t0.Add(time.Minute), 1e9)
		return ok
	}
	s.NanoCores("a", t0, 0)
	s.NanoCores("b", t0, 0)
	s.NanoCores("a", t0, 0)
	s.NanoCores("c", t0, 0) // drops b, the least recently used key
	if !hasSample("a") || !hasSample("c") {
		t.Error("the sampler dropped a recently used key")
	}
	if hasSample("b") {
		t.Error("the sampler did not drop the least recently used key")
	}
	s.Forget("b")
	s.Forget("never seen")
	if hasSample("b") {
		t.Error("Forget did not drop the key's sample")
	}
}

func TestSamplerFillsTheMessage(t *testing.T) {
	s := stats.NewSampler(10)
	f := stats.Figures{Time: time.Now()}
	if s.CPUUsage("a", f).UsageNanoCores != nil {
		t.Error("the first sample has a rate")
	}
	f.Time, f.CPU = f.Time.Add(10*time.Second), 1e9
	u := s.CPUUsage("a", f)
	if u.UsageNanoCores.GetValue() != 1e8 || u.UsageCoreNanoSeconds.GetValue() != 1e9 || u.Timestamp != f.Time.UnixNano() {
		t.Errorf("CPUUsage = %v, want a rate of 1e8 and the figures of f", u)
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
