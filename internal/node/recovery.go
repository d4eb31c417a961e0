package node

import (
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
	// startPatience is how long Open waits for backends; their pods take no orders before they are recovered.
	startPatience = 5 * time.Second
	// settlePatience is how long Open waits for what is left over, which takes milliseconds unless something is stuck.
	settlePatience = time.Second
	// recoverTimeout bounds a backend's recovery.
	recoverTimeout = time.Minute
)

// errRecovering is why a handler's pods take no orders yet.
var errRecovering = fmt.Errorf("its backend still looks for what runs: %w", errdefs.ErrUnavailable)

// Open reads the record and brings it and the node together: what runs is adopted, what ended is recorded. What was half-made
// when the daemon died is then rolled back, and what was being removed is removed, beside the node that serves: neither may wait
// for the other. An order for one of these pods waits for its turn. Open itself waits for the backends and for what is left over
// for a moment only: startPatience and settlePatience.
//
// Nothing is deleted when the record cannot be read in full: Open fails instead.
func Open(ctx context.Context, config Config) (*Node, error) {
	if err := config.setDefaults(); err != nil {
		return nil, err
	}
	n := &Node{
		Config: config, log: config.Logger, store: config.Store, pool: newPool(), index: newIndex(), events: newHub(), duty: newDuty(ctx),
		kick: make(chan struct{}, 1), left: newLeftovers(),
	}
	if err := n.load(); err != nil {
		return nil, err
	}
	var keep []string
	for _, p := range n.pool.all() {
		keep = append(keep, p.id)
	}
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.stop = stop
	n.adopt(background)
	n.workers.Go(guard.Loop(n.log, "janitor", func() { n.janitor(background) }))
	n.left.begin(abandoned)
	n.workers.Go(guard.Loop(n.log, "abandoned networks", func() { n.collectNetworks(background, keep) }))
	n.left.await(settlePatience)
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

// adopt recovers every backend. Those that have not come back after startPatience, or wait for something, do it in the background.
func (n *Node) adopt(ctx context.Context) {
	var recovered sync.WaitGroup
	for handler := range n.Backends {
		n.broken.set(handler, errRecovering)
		recovered.Add(1)
		done := sync.OnceFunc(recovered.Done)
		n.workers.Go(func() {
			defer done()
			err := guard.Call(n.log, "recover "+handler, func() error { return n.recover(ctx, handler) })
			switch {
			case errors.Is(err, sandbox.ErrAway):
				n.log.Warn("a backend waits for what it stands on; until then its pods take no orders", "handler", handler, "err", err)
				done()
				guard.Loop(n.log, "recover "+handler, func() { n.recoverAway(ctx, handler) })()
			case err != nil:
				n.broken.set(handler, err)
				n.log.Error("a backend could not be recovered; its pods take no orders", "handler", handler, "err", err)
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
		n.log.Warn("a backend takes long to look for what runs; the node serves without it meanwhile", "patience", startPatience)
	}
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

// settle takes the slots of the containers that have an intent, and gives what brings the pod's intents to their end: what was being
// made is rolled back, what was being taken away is taken away. An order under way is left alone: the intent is its own.
func (p *livePod) settle(ctx context.Context) (finish func() error) {
	var (
		steps []func() error
		errs  []error
	)
	take := func(s *slot, call Call, work func(context.Context) error) {
		o := p.node.order(call)
		o.bound = true
		perform, err := s.take(ctx, o)
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
		if rec := p.rec.Load(); rec.State == "" || rec.Intent != "" {
			take(&p.slot, rec.Intent, p.settleSandbox)
		}
		for _, step := range steps {
			errs = append(errs, step())
		}
		return errors.Join(errs...)
	}
}

// settleSandbox ends the intent of the pod itself, in its slot.
func (p *livePod) settleSandbox(ctx context.Context) error {
	switch rec := p.rec.Load(); {
	case p.isGone():
		return nil
	case rec.State == "":
		return ignoreGone(p.unmakeSandbox(ctx))
	case rec.Intent == RemovePodSandbox:
		return ignoreGone(p.removeSandbox(ctx))
	case rec.Intent == StopPodSandbox:
		return ignoreGone(p.stopSandbox(ctx))
	}
	return nil
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
