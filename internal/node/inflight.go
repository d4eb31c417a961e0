package node

import (
	"context"
	"sync"
	"time"
)

// inflight counts the orders under way, so that Close can wait for them before the store is closed.
type inflight struct {
	// ctx is cancelled with errNodeClosed when the node stops waiting for the orders under way.
	ctx    context.Context
	giveUp context.CancelCauseFunc

	mu     sync.Mutex
	closed bool
	count  int
	idle   chan struct{} // closed once close was called and no order is under way
}

func newInflight(ctx context.Context) *inflight {
	d := &inflight{idle: make(chan struct{})}
	d.ctx, d.giveUp = context.WithCancelCause(context.WithoutCancel(ctx))
	return d
}

// begin registers an order under way. It fails once the node is closed.
func (d *inflight) begin() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errNodeClosed
	}
	d.count++
	return nil
}

func (d *inflight) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.count--; d.closed && d.count == 0 {
		close(d.idle)
	}
}

// close refuses new orders and waits for those under way. If they take longer than the given time, it cancels their
// context and waits once more for the same time. It reports whether all orders have ended.
func (d *inflight) close(patience time.Duration) bool {
	d.mu.Lock()
	if !d.closed {
		d.closed = true
		if d.count == 0 {
			close(d.idle)
		}
	}
	d.mu.Unlock()
	defer d.giveUp(errNodeClosed)
	for range 2 {
		timer := time.NewTimer(patience)
		select {
		case <-d.idle:
			timer.Stop()
			return true
		case <-timer.C:
			d.giveUp(errNodeClosed)
		}
	}
	return false
}
