package dataplane

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
)

// Limiter bounds the number of concurrent requests. Further requests wait in a bounded queue for a limited time.
type Limiter struct {
	slots   chan struct{}
	waiting atomic.Int64
	wait    time.Duration
}

// NewLimiter returns a Limiter that allows the given number of concurrent requests. The same number of further requests
// can wait in its queue, each for at most the given duration.
func NewLimiter(limit int, wait time.Duration) *Limiter {
	return &Limiter{slots: make(chan struct{}, limit), wait: wait}
}

// acquire takes a slot, and waits for one if necessary. If the wait fails, acquire returns the status for refusing the
// request. release gives the slot back. A nil Limiter has no limit.
func (l *Limiter) acquire(ctx context.Context) *Status {
	if l == nil {
		return nil
	}
	select {
	case l.slots <- struct{}{}:
		return nil
	default:
	}
	defer l.waiting.Add(-1)
	if l.waiting.Add(1) > int64(cap(l.slots)) {
		return Errorf(codes.ResourceExhausted, "%d requests are in progress and as many are waiting", cap(l.slots))
	}
	timer := time.NewTimer(l.wait)
	defer timer.Stop()
	select {
	case l.slots <- struct{}{}:
		return nil
	case <-timer.C:
		return Errorf(codes.ResourceExhausted, "%d requests are in progress, and none ended within %v", cap(l.slots), l.wait)
	case <-ctx.Done():
		return Errorf(codeOf(ctx.Err()), "the request ended while it waited for other requests")
	}
}

func (l *Limiter) release() {
	if l != nil {
		<-l.slots
	}
}

// codeOf returns the code for a context error.
func codeOf(err error) codes.Code {
	if err == context.DeadlineExceeded {
		return codes.DeadlineExceeded
	}
	return codes.Canceled
}
