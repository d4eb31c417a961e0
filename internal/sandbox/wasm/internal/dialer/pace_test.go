package dialer

import (
	"context"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/tripod-run/tripod/test/until"
)

// TestPaceCountsTimeOnce checks that a goroutine that is held up after it has read the clock gives nobody a turn too many.
func TestPaceCountsTimeOnce(t *testing.T) {
	p := newPace(rate.Every(time.Second), 1)
	start := time.Now()
	reading, goOn := make(chan struct{}), make(chan struct{})
	times := make(chan func() time.Time, 3)
	times <- func() time.Time { return start }
	times <- func() time.Time {
		close(reading)
		<-goOn
		return start
	}
	times <- func() time.Time { return start.Add(time.Second) }
	p.now = func() time.Time { return (<-times)() }
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	if err := p.wait(ctx); err != nil {
		t.Fatal(err)
	}
	wait := func() { _ = p.wait(ctx) } // ended by cancel
	wg.Go(wait)
	<-reading
	wg.Go(wait)
	time.Sleep(50 * time.Millisecond) // pacing: the second one could overtake the first
	close(goOn)
	until.Holds(t, "both have read the clock", func() bool { return len(times) == 0 })
	until.Holds(t, "one turn is owed after a second", func() bool { return p.limit.TokensAt(start.Add(time.Second)) == -1 })
	cancel()
	wg.Wait()
}

// TestPaceRefuses checks that nobody waits for a turn that comes too late, and that such turns are not lost for others.
func TestPaceRefuses(t *testing.T) {
	p := newPace(rate.Every(time.Hour), 1)
	if err := p.wait(t.Context()); err != nil {
		t.Errorf("the first wait = %v", err)
	}
	soon, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 3 {
		if err := p.wait(soon); err != errPace {
			t.Errorf("wait beyond the deadline = %v, want %v", err, errPace)
		}
	}
	if tokens := p.limit.Tokens(); tokens < -0.5 {
		t.Errorf("%v tokens are left, want about 0", tokens)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.wait(ended); err != context.Canceled {
		t.Errorf("wait of a request that has ended = %v, want Canceled", err)
	}
}
