package node

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
)

var (
	failStopSandboxIntent     = failpoint.New("node.stop-sandbox.intent")
	failStopSandboxContainers = failpoint.New("node.stop-sandbox.containers")
	failStopSandboxKilled     = failpoint.New("node.stop-sandbox.killed")
	failStopSandboxNetwork    = failpoint.New("node.stop-sandbox.network")
	failStopSandboxCommit     = failpoint.New("node.stop-sandbox.commit")
)

// StopSandbox forces the pod's containers down and frees its network (CRI StopPodSandbox). An unknown or stopped
// pod is a success.
func (n *Node) StopSandbox(ctx context.Context, id string) error {
	p, err := n.orderPod(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return ignoreGone(p.slot.run(ctx, n.order(StopPodSandbox), p.stopSandbox))
}

func ignoreGone(err error) error {
	if errors.Is(err, errPodGone) {
		return nil
	}
	return err
}

// stopSandbox is StopPodSandbox in the pod's slot. It goes on where an earlier one failed or died: the intent is
// recorded first, the state becomes Killed when nothing runs any more, and the intent ends with the IP's release.
// A record that cannot be written keeps nobody from stopping a pod.
func (p *livePod) stopSandbox(ctx context.Context) error {
	rec := p.rec.Load()
	switch {
	case p.isGone():
		return errPodGone
	case rec.State == "":
		return p.unmakeSandbox(ctx)
	case rec.State == Killed && rec.Intent == "":
		return nil
	case rec.State == Initiated:
		if err := p.bringDown(ctx); err != nil {
			p.node.wakeJanitor()
			return err
		}
	default:
		if err := p.forceDown(ctx); err != nil {
			p.node.wakeJanitor()
			return err
		}
	}
	if err := p.freeSandbox(ctx); err != nil {
		p.node.wakeJanitor()
		return err
	}
	return nil
}

// bringDown goes from Initiated to Killed: no order may begin, those under way are overridden, containers are killed.
func (p *livePod) bringDown(ctx context.Context) error {
	if err := p.observe(func(next *Pod) error { next.Intent = later(next.Intent, StopPodSandbox); return nil }); err != nil {
		return err
	}
	if err := failStopSandboxIntent.Hit(ctx); err != nil {
		return err
	}
	if err := p.eachContainer(func(c *Container) error {
		if c.State == Starting || c.State == Running || c.State == "" {
			return p.stopContainer(ctx, c.ID, c.key(), 0)
		}
		return nil
	}); err != nil {
		return fmt.Errorf("stop the containers of pod %s: %w", p.id, err)
	}
	if err := failStopSandboxContainers.Hit(ctx); err != nil {
		return err
	}
	if err := p.backend.StopSandbox(ctx, p.rec.Load().sandboxPod()); err != nil {
		return err
	}
	if err := p.observe(func(next *Pod) error { next.State = Killed; return nil }); err != nil {
		return err
	}
	return failStopSandboxKilled.Hit(ctx)
}

// forceDown makes sure that nothing runs in a pod that became Killed without an order (a lost sandbox) or whose stop
// was cut short after that.
func (p *livePod) forceDown(ctx context.Context) error {
	rec := p.rec.Load()
	err := p.eachContainer(func(c *Container) error {
		return p.backend.StopContainer(ctx, rec.sandboxPod(), c.sandboxContainer(), 0)
	})
	if err != nil {
		return fmt.Errorf("stop the containers of pod %s: %w", p.id, err)
	}
	return p.backend.StopSandbox(ctx, rec.sandboxPod())
}

// freeSandbox releases the network of a Killed pod and ends the intent to stop it.
func (p *livePod) freeSandbox(ctx context.Context) error {
	if err := p.releaseNetwork(ctx, p.rec.Load()); err != nil {
		return err
	}
	if err := failStopSandboxNetwork.Hit(ctx); err != nil {
		return err
	}
	err := p.observe(func(next *Pod) error {
		if next.Intent == StopPodSandbox {
			next.Intent = ""
		}
		return nil
	})
	if err != nil {
		return err
	}
	return failStopSandboxCommit.Hit(ctx)
}

// later keeps the intent that goes further.
func later(have, want Call) Call {
	if have == RemovePodSandbox {
		return have
	}
	return want
}

// eachContainer calls do for all containers of the record at once and waits for all.
func (p *livePod) eachContainer(do func(*Container) error) error {
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
	)
	for _, c := range p.rec.Load().Containers {
		wg.Go(func() {
			if err := guard.Call(p.node.log, "containers of a pod", func() error { return do(c) }); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// sandboxLost records that a sandbox can no longer be used (its namespaces, init process or machine are gone):
// what its containers left is gathered, it becomes Killed, and its network is released in the background.
func (p *livePod) sandboxLost(why string) {
	err := p.observe(func(next *Pod) error {
		if next.State != Initiated {
			return nil
		}
		next.State, next.Intent = Killed, later(next.Intent, StopPodSandbox)
		for _, c := range next.Containers {
			if c.State == Starting || c.State == Running {
				c.finish(lostStatus(why))
			}
		}
		return nil
	})
	p.node.log.Warn("sandbox lost", "pod", p.id, "why", why, "err", err)
	p.node.wakeJanitor()
}
