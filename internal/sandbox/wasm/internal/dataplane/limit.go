package dataplane

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
)

// Limiter bounds how many requests are under way at a time. More wait in a bounded queue for a short while.
type Limiter struct {
	slots   chan struct{}
	waiting atomic.Int64
	wait    time.Duration
}

// NewLimiter makes a Limiter for limit requests at a time, with as many again waiting, each for at most wait.
func NewLimiter(limit int, wait time.Duration) *Limiter {
	return &Limiter{slots: make(chan struct{}, limit), wait: wait}
}

// acquire takes a slot, which release gives back. A nil Limiter has no end of slots.
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
		return Errorf(codes.ResourceExhausted, "%d requests are under way and as many wait; no more are taken", cap(l.slots))
	}
	timer := time.NewTimer(l.wait)
	defer timer.Stop()
	select {
	case l.slots <- struct{}{}:
		return nil
	case <-timer.C:
		return Errorf(codes.ResourceExhausted, "%d requests are under way, and none ended within %v", cap(l.slots), l.wait)
	case <-ctx.Done():
		return Errorf(codeOf(ctx.Err()), "the request ended while it waited for its turn")
	}
}

func (l *Limiter) release() {
	if l != nil {
		<-l.slots
	}
}

// codeOf is the code of a context's end.
func codeOf(err error) codes.Code {
	if err == context.DeadlineExceeded {
		return codes.DeadlineExceeded
	}
	return codes.Canceled
}
