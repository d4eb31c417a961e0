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

// StopSandbox kills the pod's containers and releases its network (CRI StopPodSandbox). It succeeds for an unknown or
// stopped pod.
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

// stopSandbox implements StopPodSandbox inside the pod's slot and resumes where an earlier call failed: it records the
// intent, commits Killed once no container runs, and clears the intent once the network is released. The stop continues
// even if the record cannot be written.
func (p *livePod) stopSandbox(ctx context.Context) error {
	rec := p.rec.Load()
	switch {
	case p.isGone():
		return errPodGone
	case rec.State == "":
		return p.rollBackSandbox(ctx)
	case rec.State == Killed && rec.Intent == "":
		return nil
	}
	kill := p.ensureKilled
	if rec.State == Initiated {
		kill = p.kill
	}
	err := kill(ctx)
	if err == nil {
		err = p.finishStop(ctx)
	}
	if err != nil {
		p.node.wakeJanitor()
	}
	return err
}

// kill takes the pod from Initiated to Killed: it refuses new orders, cancels those under way and kills the containers.
func (p *livePod) kill(ctx context.Context) error {
	if err := p.announce(func(next *Pod) error { next.Intent = strongerIntent(next.Intent, StopPodSandbox); return nil }); err != nil {
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
	p.node.Hooks.StopPod(ctx, p.rec.Load())
	if err := failStopSandboxContainers.Hit(ctx); err != nil {
		return err
	}
	if err := p.stopSandboxInBackend(ctx, p.rec.Load()); err != nil {
		return err
	}
	if err := p.announce(func(next *Pod) error { next.State = Killed; return nil }); err != nil {
		return err
	}
	return failStopSandboxKilled.Hit(ctx)
}

// ensureKilled stops everything in a pod that became Killed without an order (a lost sandbox) or whose stop was
// interrupted.
func (p *livePod) ensureKilled(ctx context.Context) error {
	rec := p.rec.Load()
	err := p.eachContainer(func(c *Container) error {
		return p.stopInBackend(ctx, rec, c, 0)
	})
	if err != nil {
		return fmt.Errorf("stop the containers of pod %s: %w", p.id, err)
	}
	p.node.Hooks.StopPod(ctx, rec)
	return p.stopSandboxInBackend(ctx, rec)
}

// finishStop releases the network of a Killed pod and clears its intent StopPodSandbox.
func (p *livePod) finishStop(ctx context.Context) error {
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

// networkReleased reports whether finishStop has released the pod's network. The release itself can still be under way
// in the network's background, and a new process continues it.
func (p *Pod) networkReleased() bool { return p.State == Killed && p.Intent != StopPodSandbox }

// strongerIntent returns the existing intent if that is RemovePodSandbox, because removing a pod includes stopping it.
// Otherwise it returns the wanted intent.
func strongerIntent(have, want Call) Call {
	if have == RemovePodSandbox {
		return have
	}
	return want
}

// eachContainer calls the function for all containers of the record concurrently, and waits for all calls.
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

// sandboxLost records that a sandbox became unusable, because its namespaces, init process or machine are gone. It
// commits Killed and the containers' exits. The janitor then releases the network.
func (p *livePod) sandboxLost(why string) {
	err := p.observe(func(next *Pod) error {
		if next.State != Initiated {
			return nil
		}
		next.State, next.Intent = Killed, strongerIntent(next.Intent, StopPodSandbox)
		for _, c := range next.Containers {
			if c.State == Starting || c.State == Running {
				c.finish(lostStatus(why))
			}
		}
		return nil
	})
	p.node.log.Warn("sandbox lost", "pod", p.id, "reason", why, "err", err)
	p.node.wakeJanitor()
}
