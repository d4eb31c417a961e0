package stats

import (
	"container/list"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// MinWindow is the shortest time over which a Sampler computes a rate. In a shorter window, the granularity of the
// kernel's counters would distort the rate, and two clients that poll at different intervals would disturb each other.
const MinWindow = 500 * time.Millisecond

// Sampler computes UsageNanoCores from cumulative CPU usage. It keeps the last sample of each key. The number of keys
// is limited: to make room for a new key, it drops the least recently used key. It is safe for concurrent use.
type Sampler struct {
	mu   sync.Mutex
	max  int
	keys map[string]*list.Element
	// recent contains *sample, the most recently used first.
	recent *list.List
}

type sample struct {
	key   string
	time  time.Time
	usage uint64
	// rate is the rate in the window that ended with this sample. It is valid only if rated is true.
	rate  uint64
	rated bool
}

// NewSampler makes a sampler for up to size keys.
func NewSampler(size int) *Sampler {
	return &Sampler{max: max(size, 1), keys: map[string]*list.Element{}, recent: list.New()}
}

// CPUUsage returns f.CPUUsage, with UsageNanoCores if NanoCores returns a rate.
func (s *Sampler) CPUUsage(key string, f Figures) *runtimeapi.CpuUsage {
	usage := f.CPUUsage()
	usage.UsageNanoCores = optional(s.NanoCores(key, f.Time, f.CPU))
	return usage
}

// NanoCores records a sample of a key's cumulative usage, in core-nanoseconds, and returns the mean rate since the
// previous sample, in core-nanoseconds per second. If less than MinWindow has passed since then, it ignores the new
// sample and returns the previous rate. There is no rate for a key's first sample. There is also none if the usage has
// decreased, because then a new cgroup has the old cgroup's name.
func (s *Sampler) NanoCores(key string, at time.Time, usage uint64) (uint64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.keys[key]
	if !ok {
		s.insert(&sample{key: key, time: at, usage: usage})
		return 0, false
	}
	s.recent.MoveToFront(e)
	last := e.Value.(*sample)
	window := at.Sub(last.time)
	switch {
	case usage < last.usage:
		*last = sample{key: key, time: at, usage: usage}
	case window >= MinWindow:
		rate := float64(usage-last.usage) / window.Seconds()
		*last = sample{key: key, time: at, usage: usage, rate: uint64(rate), rated: true}
	}
	return last.rate, last.rated
}

// Forget drops the samples of a key.
func (s *Sampler) Forget(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := s.keys[key]; ok {
		s.drop(e)
	}
}

func (s *Sampler) insert(n *sample) {
	if s.recent.Len() >= s.max {
		s.drop(s.recent.Back())
	}
	s.keys[n.key] = s.recent.PushFront(n)
}

func (s *Sampler) drop(e *list.Element) {
	delete(s.keys, e.Value.(*sample).key)
	s.recent.Remove(e)
}
