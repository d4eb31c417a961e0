package dialer

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// pace is a rate limit for goroutines that wait for their turn. The Wait method of rate.Limiter reads the clock before it
// takes its lock. If a goroutine is held up in between, it sets the limiter's clock back, so the same time counts twice: on
// a busy machine a pod got some lookups more than its limit.
type pace struct {
	mu    sync.Mutex
	limit *rate.Limiter
	now   func() time.Time // time.Now, but in tests
}

// newPace returns a pace of n per second, of which burst can be at once.
func newPace(n rate.Limit, burst int) *pace {
	return &pace{limit: rate.NewLimiter(n, burst), now: time.Now}
}

var errPace = errors.New("the turn would come after the deadline")

// wait waits for the caller's turn. It returns an error at once if the turn would come after ctx's deadline.
func (p *pace) wait(ctx context.Context) error {
	p.mu.Lock()
	now := p.now()
	turn := p.limit.ReserveN(now, 1)
	p.mu.Unlock()
	delay := turn.DelayFrom(now)
	if deadline, ok := ctx.Deadline(); ok && now.Add(delay).After(deadline) {
		turn.Cancel()
		return errPace
	}
	if delay == 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		turn.Cancel()
		return ctx.Err()
	}
}
