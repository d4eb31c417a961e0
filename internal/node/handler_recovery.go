package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
)

const (
	// Shortest and longest pause between two attempts to recover a backend whose dependency is missing.
	recoveryRetryMin = 500 * time.Millisecond
	recoveryRetryMax = 10 * time.Second
)

// handlerErrors maps a handler to the error that keeps it from recovering. Pods of that handler are listed in their
// last known state and accept no orders.
type handlerErrors struct {
	mu  sync.Mutex
	why map[string]error
}

// get returns nil for a handler whose pods accept orders.
func (h *handlerErrors) get(handler string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.why[handler]
}

// set records why a handler's pods accept no orders; a nil error means that they accept orders.
func (h *handlerErrors) set(handler string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		delete(h.why, handler)
		return
	}
	if h.why == nil {
		h.why = map[string]error{}
	}
	h.why[handler] = err
}

func notReady(handler string, why error) error {
	return fmt.Errorf("runtime handler %q is not ready (%v): %w", handler, why, errdefs.ErrUnavailable)
}

// recover compares a backend's pods and foreign containers with their records and corrects the records. A pod accepts orders once
// the backends of all its containers have recovered; an order for a pod with pending work waits for that work.
func (n *Node) recover(background context.Context, handler string) error {
	ctx, cancel := context.WithTimeout(background, recoverTimeout)
	defer cancel()
	found, err := n.Backends[handler].Recover(ctx, n.known(handler), n.report)
	if err != nil {
		n.handlerErrors.set(handler, err)
		return err
	}
	for p, finish := range n.reconcile(background, handler, found) {
		n.inBackground(p, finish)
	}
	return nil
}

// reconcile compares a handler's pods and foreign containers with what its backend has found, and lets the handler accept orders. It
// returns the pods with pending work and the functions that complete the work. The backend that recovers last settles a
// pod with foreign containers.
func (n *Node) reconcile(background context.Context, handler string, found sandbox.Found) map[*livePod]func() error {
	n.recovering.Lock()
	defer n.recovering.Unlock()
	finish := map[*livePod]func() error{}
	for _, p := range n.pool.all() {
		handlers := p.rec.Load().handlers()
		if !slices.Contains(handlers, handler) {
			continue
		}
		p.reconcile(handler, found)
		others := slices.DeleteFunc(handlers, func(h string) bool { return h == handler || n.handlerErrors.get(h) == nil })
		if len(others) == 0 && p.pending() {
			finish[p] = p.settle(background)
		}
	}
	n.handlerErrors.set(handler, nil)
	return finish
}

// retryRecovery tries to recover a backend whose dependency is missing, until an attempt succeeds or fails for another
// reason.
func (n *Node) retryRecovery(ctx context.Context, handler string) {
	for pause := recoveryRetryMin; guard.Sleep(ctx, pause) == nil; pause = min(2*pause, recoveryRetryMax) {
		err := n.recover(ctx, handler)
		switch {
		case err == nil:
			n.log.Info("backend recovered; its pods accept orders", "runtime", handler)
			n.wakeJanitor()
			return
		case !errors.Is(err, sandbox.ErrAway) && ctx.Err() == nil:
			n.log.Error("recovery of a backend failed; its pods accept no orders", "runtime", handler, "err", err)
			return
		}
	}
}
