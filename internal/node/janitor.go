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
	// janitorFirst and janitorLast are the shortest and the longest pause between two tries to end what is pending of a pod.
	janitorFirst = time.Second
	janitorLast  = time.Minute
	// leftoverPatience is how long cleaning up may take before it is reported.
	leftoverPatience = 5 * time.Second
)

// leftovers has what is over and could not be cleaned up yet, by pod ID.
type leftovers struct {
	mu  sync.Mutex
	all map[string]*leftover
	// tried is closed and made again when a try has come to its end.
	tried chan struct{}
}

func newLeftovers() leftovers {
	return leftovers{all: map[string]*leftover{}, tried: make(chan struct{})}
}

// leftover is one of them. A try of it is under way while it is busy.
type leftover struct {
	since time.Time
	// err is why the last try failed; nil as long as the first is under way.
	err error

	pause time.Duration
	next  time.Time
	busy  bool
}

// begin says that a first try is under way.
func (l *leftovers) begin(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all[id] = &leftover{since: time.Now(), pause: janitorFirst, busy: true}
}

// due tells whether what is pending of a pod is to be tried now, and if not, how long it has time. The first try is janitorFirst
// after it was seen.
func (l *leftovers) due(id string) (now bool, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	one := l.all[id]
	if one == nil {
		one = &leftover{since: time.Now(), pause: janitorFirst, next: time.Now().Add(janitorFirst)}
		l.all[id] = one
	}
	if one.busy {
		return false, janitorLast
	}
	wait = time.Until(one.next)
	one.busy = wait <= 0
	return one.busy, wait
}

func (l *leftovers) end(id string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one := l.all[id]; one != nil {
		one.err, one.busy, one.pause = err, false, min(2*one.pause, janitorLast)
		one.next = time.Now().Add(one.pause)
		if err == nil {
			delete(l.all, id)
		}
	}
	close(l.tried)
	l.tried = make(chan struct{})
}

// forget drops what was left over of pods that are no more: an order has ended it, besides the janitor.
func (l *leftovers) forget(pods []*livePod) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.all {
		if id != abandoned && !slices.ContainsFunc(pods, func(p *livePod) bool { return p.id == id }) {
			delete(l.all, id)
		}
	}
}

// await waits until everything was tried once, but not for long.
func (l *leftovers) await(patience time.Duration) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		l.mu.Lock()
		tried, left := l.tried, false
		for _, one := range l.all {
			left = left || one.err == nil
		}
		l.mu.Unlock()
		if !left {
			return
		}
		select {
		case <-tried:
		case <-timer.C:
			return
		}
	}
}

// abandoned is the key of networks that belong to no pod of the record.
const abandoned = "abandoned networks"

// Leftovers says what is over and could not be cleaned up: nil, or how much of it there is, since when, and why the oldest is
// there. It is tried again in the background. Addresses stay taken until their plugins have given them back.
func (n *Node) Leftovers() error {
	n.left.mu.Lock()
	defer n.left.mu.Unlock()
	var (
		count  int
		oldest *leftover
		of     string
	)
	for id, one := range n.left.all {
		if one.err == nil && time.Since(one.since) < leftoverPatience {
			continue
		}
		count++
		if oldest == nil || one.since.Before(oldest.since) {
			oldest, of = one, id
		}
	}
	if count == 0 {
		return nil
	}
	why := oldest.err
	if why == nil {
		why = fmt.Errorf("the first try has not come back: %w", errdefs.ErrUnavailable)
	}
	return fmt.Errorf("%d could not be cleaned up yet, the oldest, %s, since %s: %w", count, of, oldest.since.UTC().Format(time.RFC3339), why)
}

// inBackground ends what is pending of a pod, by what settle gave.
func (n *Node) inBackground(p *livePod, finish func() error) {
	n.left.begin(p.id)
	n.workers.Go(func() {
		err := guard.Call(n.log, "settle a pod", finish)
		n.left.end(p.id, err)
		if err != nil {
			n.log.Warn("a pod could not be settled, to be retried", "pod", p.id, "err", err)
			n.wakeJanitor()
		}
	})
}

// wakeJanitor has the janitor look for what is pending.
func (n *Node) wakeJanitor() {
	select {
	case n.kick <- struct{}{}:
	default:
	}
}

// tried is the outcome of one try of the janitor's.
type tried struct {
	pod *livePod
	err error
}

// janitor retries what could not be ended when it was ordered: a CNI DEL that fails, a mount that is busy. Each pod is tried by
// itself, with growing pauses, so that one whose plugin hangs keeps no other.
func (n *Node) janitor(ctx context.Context) {
	outcomes := make(chan tried)
	timer := time.NewTimer(janitorFirst)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.kick:
		case o := <-outcomes:
			n.retryLater(o)
		case <-timer.C:
		}
		timer.Reset(n.sweep(ctx, outcomes))
	}
}

// sweep begins the tries that are due, and gives how long there will be none.
func (n *Node) sweep(ctx context.Context, outcomes chan<- tried) (pause time.Duration) {
	pause = janitorLast
	all := n.pool.all()
	n.left.forget(all)
	for _, p := range all {
		if !p.pending() {
			n.left.end(p.id, nil)
			continue
		}
		now, wait := n.left.due(p.id)
		if !now {
			pause = min(pause, wait)
			continue
		}
		n.workers.Go(func() {
			err := guard.Call(n.log, "settle a pod", func() error { return p.tidy(ctx) })
			select {
			case outcomes <- tried{p, err}:
			case <-ctx.Done():
			}
		})
	}
	return pause
}

// retryLater notes the outcome of a try. What is pending without an error belongs to an order under way: it is looked at again, and
// is nothing left over.
func (n *Node) retryLater(o tried) {
	n.left.end(o.pod.id, o.err)
	if o.err != nil {
		n.log.Warn("still pending", "pod", o.pod.id, "err", o.err)
	}
}

// tidy is one try to end what is pending of a pod.
func (p *livePod) tidy(ctx context.Context) error {
	err := p.write()
	if p.backend == nil || p.node.broken.of(p.rec.Load().Handler) != nil {
		return err
	}
	return errors.Join(err, p.settle(ctx)())
}

// collectNetworks gives back the networks of pods that are no more, of which keep are none.
func (n *Node) collectNetworks(ctx context.Context, keep []string) {
	for pause := janitorFirst; ; pause = min(2*pause, janitorLast) {
		err := n.Network.GC(ctx, keep)
		if ctx.Err() != nil {
			return
		}
		n.left.end(abandoned, err)
		if err == nil {
			return
		}
		n.log.Warn("abandoned networks could not be given back, to be retried", "next", pause, "err", err)
		if !sleep(ctx, pause) {
			return
		}
	}
}

// sleep paces a loop; false when ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
