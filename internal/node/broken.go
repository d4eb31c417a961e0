package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

const (
	// awayFirst and awayLast are the shortest and the longest pause between two recoveries of a backend that waits for
	// something.
	awayFirst = 500 * time.Millisecond
	awayLast  = 10 * time.Second
)

// broken holds, by handler, why a backend could not be recovered. Its pods are listed as last known and take no orders.
type broken struct {
	mu  sync.Mutex
	why map[string]error
}

// of is nil for a handler whose pods take orders.
func (b *broken) of(handler string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.why[handler]
}

// set says why a handler's pods take no orders; nil: they do.
func (b *broken) set(handler string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		delete(b.why, handler)
		return
	}
	if b.why == nil {
		b.why = map[string]error{}
	}
	b.why[handler] = err
}

// unrecovered is the error of every order for a backend that could not be recovered.
func unrecovered(handler string, why error) error {
	return fmt.Errorf("runtime handler %q is not ready (%v): %w", handler, why, errdefs.ErrUnavailable)
}

// recover asks a backend what there is of its pods and records the differences. From then on they take orders, those with
// something pending when their turn comes.
func (n *Node) recover(background context.Context, handler string) error {
	ctx, cancel := context.WithTimeout(background, recoverTimeout)
	defer cancel()
	found, err := n.Backends[handler].Recover(ctx, n.known(handler), n.report)
	if err != nil {
		n.broken.set(handler, err)
		return err
	}
	finish := map[*livePod]func() error{}
	for _, p := range n.pool.all() {
		if p.rec.Load().Handler != handler {
			continue
		}
		p.compare(found)
		if p.pending() {
			finish[p] = p.settle(background)
		}
	}
	n.broken.set(handler, nil)
	for p, finish := range finish {
		n.inBackground(p, finish)
	}
	return nil
}

// recoverAway recovers a backend again and again until what it stands on is there.
func (n *Node) recoverAway(ctx context.Context, handler string) {
	for pause := awayFirst; sleep(ctx, pause); pause = min(2*pause, awayLast) {
		err := n.recover(ctx, handler)
		switch {
		case err == nil:
			n.log.Info("a backend has been recovered; its pods take orders", "handler", handler)
			n.wakeJanitor()
			return
		case !errors.Is(err, sandbox.ErrAway) && ctx.Err() == nil:
			n.log.Error("a backend could not be recovered; its pods take no orders", "handler", handler, "err", err)
			return
		}
	}
}
