package node

import (
	"context"
	"maps"
	"sync"
	"time"
)

// shared holds recent measurements, so that callers who list statistics at the same time share them. Nothing is measured
// unless a caller asks.
type shared[T any] struct {
	// fresh is how long a measurement is shared; 0 shares nothing.
	fresh time.Duration

	mu    sync.Mutex
	byKey map[measured]*measurement[T]
	// sweepAt is the number of entries at which old ones are dropped.
	sweepAt int
}

// measured identifies what was measured: a pod or a container, in one state, since one start.
type measured struct {
	id      string
	state   State
	started int64
}

// measurement is the latest value of a key. Sending to turn locks it, and receiving from turn unlocks it.
type measurement[T any] struct {
	turn  chan struct{}
	at    time.Time
	value T
}

// minSweep is the smallest number of measurements at which old ones are dropped.
const minSweep = 256

// get returns a fresh measurement that is good enough. Otherwise it measures and shares the result. Of callers that ask
// at the same time, one measures and the others wait for it.
func (s *shared[T]) get(ctx context.Context, key measured, enough func(T) bool, measure func() (T, error)) (value T, err error) {
	m := s.entry(key)
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return value, context.Cause(ctx)
	}
	if time.Since(m.at) < s.fresh && enough(m.value) {
		return m.value, nil
	}
	begin := time.Now()
	if value, err = measure(); err == nil {
		m.at, m.value = begin, value
	}
	return value, err
}

func (s *shared[T]) entry(key measured) *measurement[T] {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.byKey[key]; m != nil {
		return m
	}
	if s.byKey == nil {
		s.byKey = map[measured]*measurement[T]{}
	}
	if len(s.byKey) >= max(s.sweepAt, minSweep) {
		maps.DeleteFunc(s.byKey, func(_ measured, m *measurement[T]) bool { return m.old(s.fresh) })
		s.sweepAt = 2 * len(s.byKey)
	}
	m := &measurement[T]{turn: make(chan struct{}, 1)}
	s.byKey[key] = m
	return m
}

// old reports whether a measurement is not in use and no longer fresh.
func (m *measurement[T]) old(fresh time.Duration) bool {
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
		return time.Since(m.at) >= fresh
	default:
		return false
	}
}
