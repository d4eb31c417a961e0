package bench

import (
	"slices"
	"sync"
	"time"
)

// Figure is a distribution of durations, in milliseconds.
type Figure struct {
	Call string  `json:"call"`
	N    int     `json:"n"`
	P50  float64 `json:"p50_ms"`
	P95  float64 `json:"p95_ms"`
	Max  float64 `json:"max_ms"`
}

// recorder collects durations by call. It is safe for concurrent use.
type recorder struct {
	mu    sync.Mutex
	order []string
	all   map[string][]time.Duration
}

func newRecorder() *recorder { return &recorder{all: map[string][]time.Duration{}} }

func (r *recorder) add(call string, d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all[call] == nil {
		r.order = append(r.order, call)
	}
	r.all[call] = append(r.all[call], d)
}

// time calls the function and records its duration, unless the function fails.
func (r *recorder) time(call string, do func() error) error {
	started := time.Now()
	err := do()
	if err == nil {
		r.add(call, time.Since(started))
	}
	return err
}

// count returns how often a call has succeeded.
func (r *recorder) count(call string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.all[call])
}

func (r *recorder) total(call string) (sum time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range r.all[call] {
		sum += d
	}
	return sum
}

// figures returns the distributions in the order in which the calls were first made.
func (r *recorder) figures() []Figure {
	r.mu.Lock()
	defer r.mu.Unlock()
	var figures []Figure
	for _, call := range r.order {
		figures = append(figures, figureOf(call, r.all[call]))
	}
	return figures
}

func figureOf(call string, all []time.Duration) Figure {
	sorted := slices.Sorted(slices.Values(all))
	return Figure{Call: call, N: len(sorted), P50: ms(percentile(sorted, 50)), P95: ms(percentile(sorted, 95)), Max: ms(sorted[len(sorted)-1])}
}

// percentile returns the nearest-rank percentile of sorted values.
func percentile(sorted []time.Duration, p int) time.Duration {
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
