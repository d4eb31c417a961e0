package node

import (
	"context"
	"sync"
	"time"
)

// duty counts the orders under way, so that the node can end without pulling the record from under them.
type duty struct {
	// ctx ends, with errNodeClosed as its cause, when the orders under way are given up.
	ctx    context.Context
	giveUp context.CancelCauseFunc

	mu     sync.Mutex
	closed bool
	count  int
	idle   chan struct{} // closed when the duty is closed and nothing is under way
}

func newDuty(ctx context.Context) *duty {
	d := &duty{idle: make(chan struct{})}
	d.ctx, d.giveUp = context.WithCancelCause(context.WithoutCancel(ctx))
	return d
}

// begin counts an order in, or refuses it since the node is closed.
func (d *duty) begin() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errNodeClosed
	}
	d.count++
	return nil
}

// end counts an order out.
func (d *duty) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.count--; d.closed && d.count == 0 {
		close(d.idle)
	}
}

// close takes no more orders, waits for those under way, ends the context of those that take longer than patience, and
// then waits as long again. It reports whether all have ended.
func (d *duty) close(patience time.Duration) bool {
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
