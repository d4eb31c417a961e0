package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
)

const (
	// startPatience is the time that Open waits for backends. Pods of a backend that has not recovered accept no
	// orders.
	startPatience = 5 * time.Second
	// settlePatience is the time that Open waits for pending work, which takes milliseconds unless something hangs.
	settlePatience = time.Second
	// recoverTimeout bounds a backend's recovery.
	recoverTimeout = time.Minute
)

var errRecovering = fmt.Errorf("its backend is still recovering: %w", errdefs.ErrUnavailable)

// Open reads the records and reconciles them with the node: it adopts running containers and records exits. In the
// background it rolls back creations that were incomplete when the daemon died, and completes pending removals. Orders
// for these pods wait. Open itself waits at most startPatience for backends, and at most settlePatience for pending
// work.
//
// If any record is unreadable, Open fails and deletes nothing.
func Open(ctx context.Context, config Config) (*Node, error) {
	if err := config.setDefaults(); err != nil {
		return nil, err
	}
	n := &Node{
		Config: config, log: config.Logger, store: config.Store, pool: newPool(), index: newIndex(), events: newHub(), inflight: newInflight(ctx),
		kick: make(chan struct{}, 1), leftovers: leftovers{all: map[string]*leftover{}, tried: make(chan struct{})},
		figures: newFigures(config.StatsInterval),
	}
	if err := n.load(); err != nil {
		return nil, err
	}
	var keep []string
	for _, p := range n.pool.all() {
		if !p.rec.Load().networkReleased() {
			keep = append(keep, p.id)
		}
	}
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.stop = stop
	n.adopt(background)
	n.workers.Go(guard.Loop(n.log, "janitor", func() { n.janitor(background) }))
	n.leftovers.begin(abandoned)
	n.workers.Go(guard.Loop(n.log, "abandoned networks", func() { n.collectNetworks(background, keep) }))
	n.leftovers.await(settlePatience)
	return n, nil
}

// load reads all records into the pool.
func (n *Node) load() error {
	err := n.store.All(kindPod, func(key string, raw []byte) error {
		record, err := decodePod(raw)
		if err != nil {
			return fmt.Errorf("record of pod %s: %w", key, err)
		}
		p := n.newLivePod(record, n.Backends[record.Handler])
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
		rec := p.rec.Load()
		for _, handler := range rec.handlers() {
			if n.Backends[handler] == nil {
				n.handlerErrors.set(handler, cmp.Or(n.Missing[handler], fmt.Errorf("no backend has this name: %w", errdefs.ErrUnavailable)))
			}
		}
		n.pool.update(p, nil, rec)
		n.index.update(nil, rec)
		p.view.Store(viewOf(rec))
	}
	return nil
}

// adopt recovers every backend. If a backend takes longer than startPatience or lacks a dependency, its recovery
// continues in the background.
func (n *Node) adopt(ctx context.Context) {
	var recovered sync.WaitGroup
	for handler := range n.Backends { // before any recovers: a pod with foreign containers waits for several
		n.handlerErrors.set(handler, errRecovering)
	}
	for handler := range n.Backends {
		recovered.Add(1)
		done := sync.OnceFunc(recovered.Done)
		n.workers.Go(func() {
			defer done()
			err := guard.Call(n.log, "recover "+handler, func() error { return n.recover(ctx, handler) })
			switch {
			case errors.Is(err, sandbox.ErrAway):
				n.log.Warn("a backend's dependency is missing; its pods accept no orders until it is back", "runtime", handler, "err", err)
				done()
				guard.Loop(n.log, "recover "+handler, func() { n.retryRecovery(ctx, handler) })()
			case err != nil:
				n.handlerErrors.set(handler, err)
				n.log.Error("recovery of a backend failed; its pods accept no orders", "runtime", handler, "err", err)
			}
		})
	}
	all := make(chan struct{})
	n.workers.Go(func() { recovered.Wait(); close(all) })
	timer := time.NewTimer(startPatience)
	defer timer.Stop()
	select {
	case <-all:
	case <-timer.C:
		n.log.Warn("a backend is slow to recover; the node starts without it", "after", startPatience)
	}
}

// known returns the records of a handler's pods and foreign containers in the form that Backend.Recover expects.
func (n *Node) known(handler string) []sandbox.Known {
	var known []sandbox.Known
	for _, p := range n.pool.all() {
		rec := p.rec.Load()
		k := sandbox.Known{Pod: rec.sandboxPod(), Stopped: rec.State == Killed}
		for _, c := range rec.Containers {
			if rec.handlerOf(c) == handler {
				k.Containers = append(k.Containers, c.sandboxContainer())
			}
		}
		if rec.Handler == handler || len(k.Containers) > 0 {
			known = append(known, k)
		}
	}
	return known
}

func (n *Node) report(e sandbox.Event) {
	guard.Func(n.log, "event of a backend", func() { n.record(e) })()
}

// NetworkRestored sends the event that firewall rules of pods were missing and made again.
func (n *Node) NetworkRestored(what string) {
	n.events.send([]Event{{At: time.Now(), Restored: what}})
}

func (n *Node) record(e sandbox.Event) {
	if e.Compilation != nil {
		n.events.send([]Event{{At: time.Now(), Compilation: e.Compilation}})
		return
	}
	p, err := n.pool.pod(e.PodID)
	if err != nil {
		return // removed in the meantime
	}
	if e.Fallback != "" {
		rec := p.rec.Load()
		if c := rec.find(e.ContainerID); c != nil {
			n.events.send([]Event{{At: time.Now(), PodID: rec.ID, ContainerID: c.ID, Fallback: e.Fallback, Pod: rec}})
		}
		return
	}
	if e.ContainerID == "" {
		p.sandboxLost(e.Status.Message)
		return
	}
	p.recordExit(e.ContainerID, e.Status)
}

// reconcile updates the pod's record to the state that a handler's backend found after a restart of the daemon.
func (p *livePod) reconcile(handler string, found sandbox.Found) {
	rec := p.rec.Load()
	err := p.observe(func(next *Pod) error {
		for _, c := range next.Containers {
			if next.handlerOf(c) != handler {
				continue
			}
			now := found.Containers[c.backendID()]
			if now.State == sandbox.StateRunning { // or it has ended since, which recordExit does not record for a start under way
				if s, err := p.backendOf(c).Status(context.Background(), next.sandboxPod(), c.sandboxContainer()); err == nil &&
					s.State == sandbox.StateExited {
					now = s
				}
			}
			adoptContainer(c, now)
		}
		return nil
	})
	if err != nil {
		p.node.log.Error("cannot record a recovered pod", "pod", p.id, "err", err)
	}
	if rec.Handler == handler && rec.State == Initiated && rec.Intent == "" {
		switch {
		case !found.Sandboxes[p.id]:
			p.sandboxLost("its backend does not know it")
		case !hostNetwork(rec.Config) && !p.node.Network.Present(p.id):
			p.sandboxLost("its network namespace is gone")
		}
	}
}

// adoptContainer records how a container changed while the daemon was down.
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
		if c.State == Starting { // the start had no effect; settle cleans up
			return
		}
		c.finish(lostStatus("it was not running when the node restarted"))
	default:
		c.finish(lostStatus("it did not exist when the node restarted"))
	}
}

// pending reports whether the record has an incomplete intent.
func (p *livePod) pending() bool {
	rec := p.rec.Load()
	if rec.State == "" || rec.Intent != "" || rec.Resizing || p.isUnwritten() {
		return true
	}
	for _, c := range rec.Containers {
		if c.State == "" || c.State == Starting || c.Intent != "" {
			return true
		}
	}
	return false
}

// settle takes the slots of containers with an intent. The function that it returns completes the intents of these
// containers and of the pod: it rolls back creations and completes removals. Slots in use are skipped, because their
// intents belong to orders under way.
func (p *livePod) settle(ctx context.Context) (finish func() error) {
	var (
		steps []func() error
		errs  []error
	)
	take := func(s *slot, call Call, work func(context.Context) error) {
		o := p.node.order(call)
		o.bound = true
		perform, err := s.tryAcquire(ctx, o)
		errs = append(errs, err)
		if perform != nil {
			steps = append(steps, func() error { return perform(work) })
		}
	}
	for _, c := range p.rec.Load().Containers {
		if c.State == "" || c.State == Starting || c.Intent != "" {
			take(p.slotOf(c.key()), c.Intent, func(ctx context.Context) error { return p.settleContainer(ctx, c.ID) })
		}
	}
	return func() error {
		for _, step := range steps {
			errs = append(errs, step())
		}
		steps = nil
		if rec := p.rec.Load(); rec.State == "" || rec.Intent != "" || rec.Resizing {
			take(&p.slot, cmp.Or(rec.Intent, intentResize), p.settleSandbox)
		}
		for _, step := range steps {
			errs = append(errs, step())
		}
		return errors.Join(errs...)
	}
}

// settleSandbox completes the pod's own intent. It runs inside the pod's slot.
func (p *livePod) settleSandbox(ctx context.Context) error {
	switch rec := p.rec.Load(); {
	case p.isGone():
		return nil
	case rec.State == "":
		return ignoreGone(p.rollBackSandbox(ctx))
	case rec.Intent == RemovePodSandbox:
		return ignoreGone(p.removeSandbox(ctx))
	case rec.Intent == StopPodSandbox:
		return ignoreGone(p.stopSandbox(ctx))
	case rec.Resizing:
		return p.settleResize(ctx)
	}
	return nil
}

// settleContainer completes one container's intent. It runs inside the container's slot.
func (p *livePod) settleContainer(ctx context.Context, id string) error {
	rec := p.rec.Load()
	c := rec.find(id)
	switch {
	case c == nil:
		return nil
	case c.State == "":
		return p.rollBackContainer(ctx, c)
	case c.Intent == RemoveContainer, c.Intent == intentRetain:
		return p.finishRemove(ctx, id)
	case c.Intent == intentUpdate:
		updater, ok := p.backendOf(c).(sandbox.Updater)
		if !ok {
			return nil
		}
		return p.settleUpdate(ctx, updater, id)
	case c.State == Starting:
		return p.rollBackStart(ctx, rec, c)
	}
	return nil
}

// settleUpdate applies recorded resources. If the backend rejects them permanently, the record still keeps them,
// because no caller was told that the update failed.
func (p *livePod) settleUpdate(ctx context.Context, updater sandbox.Updater, id string) error {
	err := p.applyUpdate(ctx, updater, id)
	if !rejected(err) {
		return err
	}
	p.node.log.Error("the backend rejects resources that were requested before the restart", "container", id, "err", err)
	return p.commit(func(next *Pod) error { next.find(id).Intent = ""; return nil })
}

// rollBackStart stops a container whose start was interrupted and sets its state back to Created.
func (p *livePod) rollBackStart(ctx context.Context, rec *Pod, c *Container) error {
	if err := p.stopInBackend(ctx, rec, c, 0); err != nil {
		return err
	}
	return p.commit(func(next *Pod) error {
		if again := next.find(c.ID); again.State == Starting {
			again.State = Created
		}
		return nil
	})
}
