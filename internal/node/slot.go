package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/guard"
)

// A slot lets one order at a time work on a pod or on a container.
//
// The work does not belong to the caller: when the caller goes away it goes on to its end, and the caller's retry
// waits for the slot, finds the state that the work left and, by the table's repeats, succeeds without doing it
// again. An order that makes the one under way pointless (a stop during a start) cancels it instead of waiting.
type slot struct {
	mu  sync.Mutex
	cur *operation
}

// order is what a caller wants the slot for.
type order struct {
	call Call
	// by is when a StopContainer forces the container at the latest.
	by time.Time
	// limit bounds the work.
	limit time.Duration
	// duty counts it among the node's orders.
	duty *duty
	// bound says that the work ends with the context that it is ordered by.
	bound bool
	log   *slog.Logger
}

type operation struct {
	order
	cancel context.CancelCauseFunc
	done   chan struct{}
	err    error
}

var (
	// errOverridden is the cause of a context whose order was overridden by a later one.
	errOverridden = fmt.Errorf("overridden by a later order for the same pod: %w", errdefs.ErrAborted)
	errTooLong    = fmt.Errorf("the node's operation timeout passed: %w", context.DeadlineExceeded)
)

// overrides tells whether o makes the order under way pointless.
func (o order) overrides(cur order) bool {
	switch o.call {
	case StopContainer:
		return cur.call == CreateContainer || cur.call == StartContainer || cur.call == intentUpdate ||
			cur.call == StopContainer && o.by.Before(cur.by)
	case RemoveContainer:
		return cur.call != RemoveContainer
	default:
		return false
	}
}

// run waits for the slot and does work in it. The context of work is ended by limit and by overriding orders, not by
// the end of ctx, which ends only the waiting.
func (s *slot) run(ctx context.Context, o order, work func(context.Context) error) error {
	for {
		cur, op, opctx, err := s.enter(ctx, o)
		if err != nil {
			return err
		}
		if op != nil {
			go s.perform(opctx, op, work)
			return op.wait(ctx)
		}
		if o.overrides(cur.order) {
			cur.cancel(errOverridden)
		}
		select {
		case <-cur.done:
		case <-ctx.Done():
			return fmt.Errorf("%s waits for the %s under way: %w", o.call, cur.call, context.Cause(ctx))
		}
	}
}

// take takes the slot when it is free, and gives what then does work in it; nil when it is not free.
func (s *slot) take(ctx context.Context, o order) (perform func(work func(context.Context) error) error, err error) {
	_, op, opctx, err := s.enter(ctx, o)
	if op == nil {
		return nil, err
	}
	return func(work func(context.Context) error) error {
		s.perform(opctx, op, work)
		return op.err
	}, nil
}

// enter takes the slot (op is set) or tells who has it (cur is set).
func (s *slot) enter(ctx context.Context, o order) (cur, op *operation, opctx context.Context, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cur != nil {
		return s.cur, nil, nil, nil
	}
	if err := o.duty.begin(); err != nil {
		return nil, nil, nil, err
	}
	if !o.bound {
		ctx = context.WithoutCancel(ctx)
	}
	opctx, cancel := context.WithCancelCause(ctx)
	s.cur = &operation{order: o, cancel: cancel, done: make(chan struct{})}
	return nil, s.cur, opctx, nil
}

func (s *slot) perform(ctx context.Context, op *operation, work func(context.Context) error) {
	ctx, stop := context.WithTimeoutCause(ctx, op.limit, errTooLong)
	given := context.AfterFunc(op.duty.ctx, func() { op.cancel(context.Cause(op.duty.ctx)) })
	defer op.duty.end()
	defer func() {
		given()
		stop()
		op.cancel(nil)
		s.mu.Lock()
		s.cur = nil
		s.mu.Unlock()
		close(op.done)
	}()
	op.err = explain(ctx, guard.Call(op.order.log, string(op.call), func() error { return work(ctx) }))
}

// explain puts the reason why ctx ended in the place of a bare "context canceled".
func explain(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	if cause := context.Cause(ctx); !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", err, cause)
	}
	return err
}

func (op *operation) wait(ctx context.Context) error {
	select {
	case <-op.done:
		return op.err
	default:
	}
	select {
	case <-op.done:
		return op.err
	case <-ctx.Done():
		return fmt.Errorf("%s goes on without its caller: %w", op.call, context.Cause(ctx))
	}
}
