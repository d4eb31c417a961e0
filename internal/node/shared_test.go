package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func good(int) bool { return true }

// TestSharedMeasuresOnce: callers that ask at the same time share one measurement, and so do those who ask soon after.
func TestSharedMeasuresOnce(t *testing.T) {
	s := shared[int]{fresh: time.Hour}
	var calls atomic.Int32
	begun, release := make(chan struct{}), make(chan struct{})
	measure := func() (int, error) {
		if calls.Add(1) == 1 {
			close(begun)
		}
		<-release
		return 7, nil
	}
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if v, err := s.get(t.Context(), measured{id: "a"}, good, measure); v != 7 || err != nil {
				t.Errorf("get = %d, %v, want 7", v, err)
			}
		})
	}
	<-begun
	close(release)
	wg.Wait()
	if n := calls.Load(); n != 1 {
		t.Errorf("%d measurements, want 1", n)
	}
}

func TestSharedMeasuresAgain(t *testing.T) {
	n := 0
	count := func() (int, error) { n++; return n, nil }
	get := func(s *shared[int], key measured, enough func(int) bool) int {
		t.Helper()
		v, err := s.get(t.Context(), key, enough, count)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	s := &shared[int]{fresh: time.Hour}
	key := measured{id: "a", state: Running, started: 1}
	first := get(s, key, good)
	if v := get(s, key, func(int) bool { return false }); v == first {
		t.Error("a measurement that is not good enough was shared")
	}
	for _, other := range []measured{{id: "b", state: Running, started: 1}, {id: "a", state: Stopped, started: 1},
		{id: "a", state: Running, started: 2}} {
		if before := n; get(s, other, good) != before+1 {
			t.Errorf("%+v shared the measurement of %+v", other, key)
		}
	}
	off := &shared[int]{}
	first = get(off, key, good)
	if second := get(off, key, good); second == first {
		t.Error("a measurement was shared, although sharing is off")
	}
}

// TestSharedAfterAnError: an error is not shared, and a caller that waits for another one gives up with its context.
func TestSharedAfterAnError(t *testing.T) {
	s := shared[int]{fresh: time.Hour}
	broken := errors.New("broken")
	if _, err := s.get(t.Context(), measured{id: "a"}, good, func() (int, error) { return 0, broken }); !errors.Is(err, broken) {
		t.Errorf("get = %v, want the error of the measurement", err)
	}
	begun, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = s.get(context.Background(), measured{id: "a"}, good, func() (int, error) { close(begun); <-release; return 1, nil })
	})
	<-begun
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.get(ctx, measured{id: "a"}, good, func() (int, error) { return 2, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("get during a measurement that hangs = %v, want the context's end", err)
	}
	close(release)
	wg.Wait()
}

// TestSharedIsBounded: measurements of pods that are gone are dropped.
func TestSharedIsBounded(t *testing.T) {
	s := shared[int]{fresh: time.Nanosecond}
	for i := range 10 * minSweep {
		if _, err := s.get(t.Context(), measured{id: fmt.Sprint(i)}, good, func() (int, error) { return i, nil }); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(s.byKey); n > minSweep {
		t.Errorf("%d measurements are kept, want at most %d", n, minSweep)
	}
}
