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
// The work completes even if its caller goes away. The caller's retry waits for the slot, finds the resulting state and
// succeeds, because repeated calls are idempotent. If a new order makes the order under way pointless (a stop during a
// start), the new order cancels the order under way.
type slot struct {
	mu  sync.Mutex
	cur *operation
}

type order struct {
	call Call
	// killBy is the latest time at which a StopContainer kills the container.
	killBy time.Time
	// limit bounds the work's duration.
	limit time.Duration
	// inflight counts the node's orders under way.
	inflight *inflight
	// bound means that the work ends with its caller's context.
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
	// errOverridden is the cancellation cause of an order that a later order overrides.
	errOverridden = fmt.Errorf("overridden by a later order for the same pod: %w", errdefs.ErrAborted)
	errTooLong    = fmt.Errorf("the node's operation timeout passed: %w", context.DeadlineExceeded)
)

// overrides reports whether o makes cur, the order under way, pointless.
func (o order) overrides(cur order) bool {
	switch o.call {
	case StopContainer:
		return cur.call == CreateContainer || cur.call == StartContainer || cur.call == intentUpdate ||
			cur.call == StopContainer && o.killBy.Before(cur.killBy)
	case RemoveContainer:
		return cur.call != RemoveContainer
	case StopPodSandbox, RemovePodSandbox:
		return cur.call == intentResize
	default:
		return false
	}
}

// run waits for the slot and then calls work. The context passed to work ends when the limit passes or another order
// overrides this one. If ctx ends, run returns, but the work goes on.
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
			return fmt.Errorf("%s: waiting for %s to complete: %w", o.call, cur.call, context.Cause(ctx))
		}
	}
}

// tryAcquire takes the slot. It returns a function that runs the work and then frees the slot, or nil if the slot is in
// use.
func (s *slot) tryAcquire(ctx context.Context, o order) (perform func(work func(context.Context) error) error, err error) {
	_, op, opctx, err := s.enter(ctx, o)
	if op == nil {
		return nil, err
	}
	return func(work func(context.Context) error) error {
		s.perform(opctx, op, work)
		return op.err
	}, nil
}

// enter takes the slot and returns the new operation as op. If the slot is in use, enter instead returns the operation
// that holds it as cur.
func (s *slot) enter(ctx context.Context, o order) (cur, op *operation, opctx context.Context, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cur != nil {
		return s.cur, nil, nil, nil
	}
	if err := o.inflight.begin(); err != nil {
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
	unwatch := context.AfterFunc(op.inflight.ctx, func() { op.cancel(context.Cause(op.inflight.ctx)) })
	defer op.inflight.end()
	defer func() {
		unwatch()
		stop()
		op.cancel(nil)
		s.mu.Lock()
		s.cur = nil
		s.mu.Unlock()
		close(op.done)
	}()
	op.err = withCause(ctx, guard.Call(op.order.log, string(op.call), func() error { return work(ctx) }))
}

// attempt runs the part of a call that can be undone. A panic is its error, so that it is undone like any other failure.
func (n *Node) attempt(call Call, part func() error) error {
	return guard.Call(n.log, string(call), part)
}

// withCause returns err with the reason why ctx ended.
func withCause(ctx context.Context, err error) error {
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
		return fmt.Errorf("%s continues without its caller: %w", op.call, context.Cause(ctx))
	}
}
