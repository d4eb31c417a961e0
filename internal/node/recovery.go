package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/sandbox"
)

const (
	// janitorFirst and janitorLast are the shortest and the longest pause between two tries to end what is pending.
	janitorFirst = time.Second
	janitorLast  = time.Minute
	// recoverTimeout bounds a backend's recovery; one that is stuck does not keep the others from serving.
	recoverTimeout = time.Minute
)

// Open reads the record and brings it and the node together: what runs is adopted, what ended is recorded, what was
// half-made when the daemon died is rolled back, what was being removed is removed. It returns when every pod is in
// a true state; what cannot be ended now (a CNI plugin that fails) is retried in the background.
//
// Nothing is deleted when the record cannot be read in full: Open fails instead.
func Open(ctx context.Context, config Config) (*Node, error) {
	if err := config.setDefaults(); err != nil {
		return nil, err
	}
	n := &Node{
		Config: config, log: config.Logger, store: config.Store, pool: newPool(), index: newIndex(), events: newHub(), duty: newDuty(ctx),
		kick: make(chan struct{}, 1),
	}
	if err := n.load(); err != nil {
		return nil, err
	}
	away := n.adopt(ctx)
	n.settleAll(ctx)
	var keep []string
	for _, p := range n.pool.all() {
		keep = append(keep, p.id)
	}
	if err := n.Network.GC(ctx, keep); err != nil {
		n.log.Warn("collect abandoned networks, to be retried at the next start", "err", err)
	}
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.stop = stop
	n.workers.Go(guard.Loop(n.log, "janitor", func() { n.janitor(background) }))
	for _, handler := range away {
		n.workers.Go(guard.Loop(n.log, "recover "+handler, func() { n.recoverAway(background, handler) }))
	}
	return n, nil
}

// load reads the whole record into the pool.
func (n *Node) load() error {
	err := n.store.All(kindPod, func(key string, raw []byte) error {
		record, err := decodePod(raw)
		if err != nil {
			return fmt.Errorf("record of pod %s: %w", key, err)
		}
		p := n.live(record, n.Backends[record.Handler])
		n.pool.mu.Lock()
		defer n.pool.mu.Unlock()
		n.pool.insert(p)
		if record.State != "" {
			n.pool.names[p.key] = p
		}
		return nil
	})
	if err != nil {
		return err
	}
	n.pool.sort()
	for _, p := range n.pool.all() {
		if p.backend == nil {
			n.broken.set(p.rec.Load().Handler, fmt.Errorf("no backend has this name now: %w", errdefs.ErrUnavailable))
		}
		rec := p.rec.Load()
		n.pool.track(p, nil, rec)
		n.index.track(nil, rec)
		p.view.Store(viewOf(rec))
	}
	return nil
}

// adopt recovers every backend, and gives the handlers of those that wait for something.
func (n *Node) adopt(ctx context.Context) (away []string) {
	var (
		wg sync.WaitGroup
		mu sync.Mutex
	)
	for handler := range n.Backends {
		wg.Go(func() {
			err := guard.Call(n.log, "recover "+handler, func() error { return n.recover(ctx, handler) })
			switch {
			case errors.Is(err, sandbox.ErrAway):
				n.log.Warn("a backend waits for what it stands on; until then its pods take no orders", "handler", handler, "err", err)
				mu.Lock()
				away = append(away, handler)
				mu.Unlock()
			case err != nil:
				n.log.Error("a backend could not be recovered; its pods take no orders", "handler", handler, "err", err)
			}
		})
	}
	wg.Wait()
	return away
}

// known is what the record holds of a handler's pods.
func (n *Node) known(handler string) []sandbox.Known {
	var known []sandbox.Known
	for _, p := range n.pool.all() {
		rec := p.rec.Load()
		if rec.Handler != handler {
			continue
		}
		k := sandbox.Known{Pod: rec.sandboxPod()}
		for _, c := range rec.Containers {
			k.Containers = append(k.Containers, c.sandboxContainer())
		}
		known = append(known, k)
	}
	return known
}

// report takes the backends' events.
func (n *Node) report(e sandbox.Event) {
	guard.Func(n.log, "event of a backend", func() { n.record(e) })()
}

func (n *Node) record(e sandbox.Event) {
	p, err := n.pool.pod(e.PodID)
	if err != nil {
		return // it was removed meanwhile
	}
	if e.ContainerID == "" {
		p.sandboxLost(e.Status.Message)
		return
	}
	p.ended(e.ContainerID, e.Status)
}

// compare brings the record up to what the backend found after a start of the daemon.
func (p *livePod) compare(found sandbox.Found) {
	rec := p.rec.Load()
	err := p.observe(func(next *Pod) error {
		for _, c := range next.Containers {
			adoptContainer(c, found.Containers[c.backendID()])
		}
		return nil
	})
	if err != nil {
		p.node.log.Error("record what was found of a pod", "pod", p.id, "err", err)
	}
	if rec.State == Initiated && rec.Intent == "" {
		switch {
		case !found.Sandboxes[p.id]:
			p.sandboxLost("its backend has nothing of it")
		case !hostNetwork(rec.Config) && !p.node.Network.Present(p.id):
			p.sandboxLost("its network namespace is gone")
		}
	}
}

// adoptContainer records what became of a container while the daemon was away.
func adoptContainer(c *Container, now sandbox.Status) {
	if c.State != Starting && c.State != Running {
		return
	}
	switch now.State {
	case sandbox.StateRunning:
		c.State, c.Pid = Running, now.Pid
		if c.StartedAt.IsZero() {
			c.StartedAt = now.StartedAt
		}
	case sandbox.StateExited:
		c.finish(now)
	case sandbox.StateCreated:
		if c.State == Starting { // the start had no effect yet; settle takes away what it began
			return
		}
		c.finish(lostStatus("it did not run any more when the node came back"))
	default:
		c.finish(lostStatus("nothing was left of it when the node came back"))
	}
}

// settleAll ends what was pending when the daemon died, a few pods at a time.
func (n *Node) settleAll(ctx context.Context) {
	var wg sync.WaitGroup
	queue := make(chan *livePod)
	for range 8 {
		wg.Go(func() {
			for p := range queue {
				if err := p.settle(ctx); err != nil {
					n.log.Warn("a pod could not be settled, to be retried", "pod", p.id, "err", err)
				}
			}
		})
	}
	for _, p := range n.pool.all() {
		if p.pending() {
			queue <- p
		}
	}
	close(queue)
	wg.Wait()
}

// pending tells whether an intent of the record waits for its end while no order works on it.
func (p *livePod) pending() bool {
	rec := p.rec.Load()
	if rec.State == "" || rec.Intent != "" || p.isUnwritten() {
		return true
	}
	for _, c := range rec.Containers {
		if c.State == "" || c.State == Starting || c.Intent != "" {
			return true
		}
	}
	return false
}

// settle brings the pod's intents to their end: what was being made is rolled back, what was being taken away is
// taken away. An order under way is left alone: the intent is its own.
func (p *livePod) settle(ctx context.Context) error {
	errs := []error{p.write()}
	if p.backend == nil || p.node.broken.of(p.rec.Load().Handler) != nil {
		return errs[0]
	}
	for _, c := range p.rec.Load().Containers {
		if c.State != "" && c.State != Starting && c.Intent == "" {
			continue
		}
		_, err := p.slotOf(c.key()).try(ctx, p.node.order(c.Intent), func(ctx context.Context) error {
			return p.settleContainer(ctx, c.ID)
		})
		errs = append(errs, err)
	}
	rec := p.rec.Load()
	var end func(context.Context) error
	switch {
	case rec.State == "":
		end = p.unmakeSandbox
	case rec.Intent == RemovePodSandbox:
		end = p.removeSandbox
	case rec.Intent == StopPodSandbox:
		end = p.stopSandbox
	}
	if end != nil {
		_, err := p.slot.try(ctx, p.node.order(rec.Intent), end)
		errs = append(errs, ignoreGone(err))
	}
	return errors.Join(errs...)
}

// settleContainer ends one container's intent, in its slot.
func (p *livePod) settleContainer(ctx context.Context, id string) error {
	rec := p.rec.Load()
	c := rec.find(id)
	switch {
	case c == nil:
		return nil
	case c.State == "":
		return p.unmakeContainer(ctx, c)
	case c.Intent == RemoveContainer, c.Intent == intentRetain:
		return p.finishRemove(ctx, id)
	case c.Intent == intentUpdate:
		updater, ok := p.backend.(sandbox.Updater)
		if !ok {
			return nil
		}
		return p.endUpdate(ctx, updater, id)
	case c.State == Starting:
		return p.unstart(ctx, rec, c)
	}
	return nil
}

// endUpdate applies recorded resources. What the backend refuses for good it is not asked again: the record then says
// what was wanted, as the caller was told by nobody that it failed.
func (p *livePod) endUpdate(ctx context.Context, updater sandbox.Updater, id string) error {
	err := p.applyUpdate(ctx, updater, id)
	if !errdefs.IsInvalidArgument(err) && !errdefs.IsFailedPrecondition(err) && !errdefs.IsNotImplemented(err) && !errdefs.IsNotFound(err) {
		return err
	}
	p.node.log.Error("resources that were ordered before the node died are refused", "container", id, "err", err)
	return p.commit(func(next *Pod) error { next.find(id).Intent = ""; return nil })
}

// unstart takes a container whose start was cut short before it ran back to Created.
func (p *livePod) unstart(ctx context.Context, rec *Pod, c *Container) error {
	if err := p.backend.StopContainer(ctx, rec.sandboxPod(), c.sandboxContainer(), 0); err != nil {
		return err
	}
	return p.commit(func(next *Pod) error {
		if again := next.find(c.ID); again.State == Starting {
			again.State = Created
		}
		return nil
	})
}

// wakeJanitor has the janitor look at once.
func (n *Node) wakeJanitor() {
	select {
	case n.kick <- struct{}{}:
	default:
	}
}

// janitor retries, with growing pauses, what could not be ended when it was ordered: a CNI DEL that fails, a mount
// that is busy.
func (n *Node) janitor(ctx context.Context) {
	pause := janitorFirst
	for {
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-n.kick:
			timer.Stop()
			pause = janitorFirst
			if !sleep(ctx, pause) {
				return
			}
		case <-timer.C:
		}
		left := false
		for _, p := range n.pool.all() {
			if !p.pending() {
				continue
			}
			if err := p.settle(ctx); err != nil {
				left = true
				n.log.Warn("still pending", "pod", p.id, "err", err)
			}
		}
		if left {
			pause = min(2*pause, janitorLast)
		} else {
			pause = janitorLast
		}
	}
}

// sleep paces the janitor; false when ctx ended.
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
