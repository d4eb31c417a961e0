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
)

const (
	// Shortest and longest pause between two attempts to complete a pod's pending work.
	retryMin = time.Second
	retryMax = time.Minute
	// leftoverPatience is the time after which a clean-up is reported even if its first attempt is still under way.
	leftoverPatience = 5 * time.Second
)

// leftovers holds pending clean-ups by pod ID.
type leftovers struct {
	mu  sync.Mutex
	all map[string]*leftover
	// tried is closed and replaced after every attempt.
	tried chan struct{}
}

// leftover is one pending clean-up.
type leftover struct {
	since time.Time
	// err is the last attempt's error; nil until the first attempt ends.
	err error

	pause time.Duration
	next  time.Time
	busy  bool // an attempt is under way
}

// begin records that the first attempt of a pod's clean-up is under way.
func (l *leftovers) begin(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all[id] = &leftover{since: time.Now(), pause: retryMin, busy: true}
}

// due reports whether a pod's pending work is to be attempted now and, if not, how long to wait. A pod's first attempt
// is due retryMin after the first call of due for that pod.
func (l *leftovers) due(id string) (now bool, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	entry := l.all[id]
	if entry == nil {
		entry = &leftover{since: time.Now(), pause: retryMin, next: time.Now().Add(retryMin)}
		l.all[id] = entry
	}
	if entry.busy {
		return false, retryMax
	}
	wait = time.Until(entry.next)
	entry.busy = wait <= 0
	return entry.busy, wait
}

// end records the result of an attempt. A nil error removes the entry.
func (l *leftovers) end(id string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if entry := l.all[id]; entry != nil {
		entry.err, entry.busy, entry.pause = err, false, min(2*entry.pause, retryMax)
		entry.next = time.Now().Add(entry.pause)
		if err == nil {
			delete(l.all, id)
		}
	}
	close(l.tried)
	l.tried = make(chan struct{})
}

// forget drops the entries of pods that no longer exist, because an order has cleaned them up.
func (l *leftovers) forget(pods []*livePod) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.all {
		if id != abandoned && !slices.ContainsFunc(pods, func(p *livePod) bool { return p.id == id }) {
			delete(l.all, id)
		}
	}
}

// await waits until every clean-up has been attempted once, but no longer than the given time.
func (l *leftovers) await(patience time.Duration) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		l.mu.Lock()
		tried, untried := l.tried, false
		for _, entry := range l.all {
			untried = untried || entry.err == nil
		}
		l.mu.Unlock()
		if !untried {
			return
		}
		select {
		case <-tried:
		case <-timer.C:
			return
		}
	}
}

// abandoned is the key for the clean-up of networks whose pods have no record.
const abandoned = "abandoned networks"

// Leftovers returns an error with the number of pending clean-ups and the age and cause of the oldest, or nil if none
// are pending. Clean-ups are retried in the background. Addresses stay allocated until their plugins release them.
func (n *Node) Leftovers() error {
	n.leftovers.mu.Lock()
	defer n.leftovers.mu.Unlock()
	var (
		count  int
		oldest *leftover
		name   string
	)
	for id, entry := range n.leftovers.all {
		if entry.err == nil && time.Since(entry.since) < leftoverPatience {
			continue
		}
		count++
		if oldest == nil || entry.since.Before(oldest.since) {
			oldest, name = entry, id
		}
	}
	if count == 0 {
		return nil
	}
	why := oldest.err
	if why == nil {
		why = fmt.Errorf("the first attempt has not ended: %w", errdefs.ErrUnavailable)
	}
	return fmt.Errorf("%d could not be cleaned up yet; the oldest is %s, since %s: %w", count, name, oldest.since.UTC().Format(time.RFC3339),
		why)
}

// inBackground calls finish, a function that settle has returned, in the background. If finish fails, the janitor
// retries.
func (n *Node) inBackground(p *livePod, finish func() error) {
	n.leftovers.begin(p.id)
	n.workers.Go(func() {
		err := guard.Call(n.log, "settle a pod", finish)
		n.leftovers.end(p.id, err)
		if err != nil {
			n.log.Warn("clean-up of a pod failed and will be retried", "pod", p.id, "err", err)
			n.wakeJanitor()
		}
	})
}

func (n *Node) wakeJanitor() {
	select {
	case n.kick <- struct{}{}:
	default:
	}
}

// retryResult is the result of one attempt by the janitor.
type retryResult struct {
	pod *livePod
	err error
}

// janitor retries work that orders failed to complete, such as a CNI DEL or the unmount of a busy mount. Each pod has
// its own backoff, so that a hanging plugin delays no other pod.
func (n *Node) janitor(ctx context.Context) {
	outcomes := make(chan retryResult)
	timer := time.NewTimer(retryMin)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.kick:
		case o := <-outcomes:
			// Without an error, this removes the entry. Work that is still pending then belongs to an order under way.
			n.leftovers.end(o.pod.id, o.err)
			if o.err != nil {
				n.log.Warn("clean-up of a pod failed again and will be retried", "pod", o.pod.id, "err", o.err)
			}
		case <-timer.C:
		}
		timer.Reset(n.sweep(ctx, outcomes))
	}
}

// sweep starts the attempts that are due and returns the time until the next attempt is due.
func (n *Node) sweep(ctx context.Context, outcomes chan<- retryResult) (pause time.Duration) {
	pause = retryMax
	all := n.pool.all()
	n.leftovers.forget(all)
	for _, p := range all {
		if !p.pending() {
			n.leftovers.end(p.id, nil)
			continue
		}
		now, wait := n.leftovers.due(p.id)
		if !now {
			pause = min(pause, wait)
			continue
		}
		n.workers.Go(func() {
			err := guard.Call(n.log, "settle a pod", func() error { return p.retryPending(ctx) })
			select {
			case outcomes <- retryResult{p, err}:
			case <-ctx.Done():
			}
		})
	}
	return pause
}

// retryPending makes one attempt to complete a pod's pending work.
func (p *livePod) retryPending(ctx context.Context) error {
	err := p.write()
	if p.node.acceptsOrders(p) != nil {
		return err
	}
	return errors.Join(err, p.settle(ctx)())
}

// collectNetworks releases the networks of all pods except the pods with the given IDs.
func (n *Node) collectNetworks(ctx context.Context, keep []string) {
	for pause := retryMin; ; pause = min(2*pause, retryMax) {
		err := n.Network.GC(ctx, keep)
		if ctx.Err() != nil {
			return
		}
		n.leftovers.end(abandoned, err)
		if err == nil {
			return
		}
		n.log.Warn("release of abandoned networks failed and will be retried", "after", pause, "err", err)
		if guard.Sleep(ctx, pause) != nil {
			return
		}
	}
}
