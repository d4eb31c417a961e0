package worker

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// measuredCalls is the number of calls whose time is measured before others are ended.
const measuredCalls = 8

// profiler finds out where the guest is during the calls that are the n-th of their instances: it ends them at random moments,
// and counts the functions at that moment.
type profiler struct {
	nth int

	mu      sync.Mutex
	times   []time.Duration // of calls that ended by themselves
	samples map[string]int
}

// Profile implements workerapi.Handler.
func (w *Worker) Profile(_ context.Context, id string, nth int) (workerapi.Profile, error) {
	p, err := w.pod(id)
	if err != nil {
		return workerapi.Profile{}, err
	}
	var next *profiler
	if nth > 0 {
		next = &profiler{nth: nth, samples: make(map[string]int)}
	}
	return p.profiler.Swap(next).result(), nil
}

// watch ends a call that begins now, or measures its time. The function that it returns must be called when the call has ended,
// before the instance is closed.
func (p *profiler) watch(g *guest) (ended func()) {
	if p == nil || g.served != p.nth-1 {
		return func() {}
	}
	typical := p.typical()
	if typical == 0 {
		begin := time.Now()
		return func() { p.add(time.Since(begin), nil) }
	}
	g.InterruptAfter(rand.N(typical + typical/4))
	return func() { p.add(0, g.Backtrace()) }
}

// typical returns the median time of a call, or 0 while too few have been measured.
func (p *profiler) typical() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.times) < measuredCalls {
		return 0
	}
	return slices.Sorted(slices.Values(p.times))[len(p.times)/2]
}

func (p *profiler) add(took time.Duration, functions []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if took > 0 {
		p.times = append(p.times, took)
	}
	if len(functions) > 0 {
		p.samples[strings.Join(functions, workerapi.Inside)]++
	}
}

func (p *profiler) result() workerapi.Profile {
	if p == nil {
		return workerapi.Profile{}
	}
	typical := p.typical()
	p.mu.Lock()
	defer p.mu.Unlock()
	return workerapi.Profile{Typical: typical, Samples: maps.Clone(p.samples)} // calls can still end
}
