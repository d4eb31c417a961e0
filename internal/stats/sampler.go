package stats

import (
	"container/list"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// MinWindow is the shortest time over which a Sampler computes a rate. Over less, the granularity of the kernel's counters
// shows, and two clients that poll at different intervals disturb each other.
const MinWindow = 500 * time.Millisecond

// Sampler turns cumulative CPU usage into UsageNanoCores. It remembers the last sample of each key, up to a number of keys,
// and drops the least recently used. It may be used from many goroutines.
type Sampler struct {
	mu   sync.Mutex
	max  int
	keys map[string]*list.Element
	// recent lists *sample, the most recently used first.
	recent *list.List
}

type sample struct {
	key   string
	time  time.Time
	usage uint64
	// rate is that of the window that ended at time.
	rate  uint64
	rated bool
}

// NewSampler makes a sampler for up to size keys.
func NewSampler(size int) *Sampler {
	return &Sampler{max: max(size, 1), keys: map[string]*list.Element{}, recent: list.New()}
}

// CPUUsage is f.CPUUsage with UsageNanoCores, once the key has a sample that is MinWindow old.
func (s *Sampler) CPUUsage(key string, f Figures) *runtimeapi.CpuUsage {
	usage := f.CPUUsage()
	usage.UsageNanoCores = optional(s.NanoCores(key, f.Time, f.CPU))
	return usage
}

// NanoCores records a sample of key's cumulative usage (core-nanoseconds) and returns the mean rate since the previous one,
// in core-nanoseconds per second. There is no rate for the first sample, nor after the usage decreased, which means a new
// cgroup of the same name.
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
