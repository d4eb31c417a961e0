package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/spans"
)

var (
	failRunIntent  = failpoint.New("node.run-sandbox.intent")
	failRunNetwork = failpoint.New("node.run-sandbox.network")
	failRunBackend = failpoint.New("node.run-sandbox.backend")
	failRunCommit  = failpoint.New("node.run-sandbox.commit")
)

// RunSandbox makes a pod sandbox (CRI RunPodSandbox) and returns its ID once its network is up. A repeated call with
// the same metadata returns the same ID while that sandbox is ready. Errors: ErrInvalidArgument, ErrNotImplemented (the
// backend does not support a field), ErrAlreadyExists (a stopped sandbox has that metadata), ErrFailedPrecondition (a host
// port is taken), ErrUnavailable.
func (n *Node) RunSandbox(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	if config.GetMetadata() == nil {
		return "", fmt.Errorf("the sandbox has no metadata: %w", errdefs.ErrInvalidArgument)
	}
	selected := n.selectHandler(handler, config)
	handler, _, err := n.Handler(selected)
	if err != nil {
		return "", fmt.Errorf("runtime_handler: %w", err)
	}
	if err := n.handlerErrors.get(handler); err != nil {
		return "", notReady(handler, err)
	}
	alias := ""
	if n.Aliases[selected] != "" {
		alias = selected
	}
	for {
		p, err := n.reserve(config, handler, alias, n.Backends[handler])
		if err != nil {
			return "", err
		}
		err = p.slot.run(ctx, n.order(RunPodSandbox), p.runSandbox)
		if !errors.Is(err, errPodGone) {
			return p.id, err
		}
	}
}

// errPodGone is the error for an order whose pod was rolled back or removed while the order waited.
var errPodGone = fmt.Errorf("the pod is gone: %w", errdefs.ErrNotFound)

// reserve finds the pod with the metadata of config, or adds a new one to the pool.
func (n *Node) reserve(config *runtimeapi.PodSandboxConfig, handler, alias string, backend sandbox.Backend) (*livePod, error) {
	pod := &Pod{Handler: handler, Alias: alias, Config: config, Intent: RunPodSandbox, unit: backend.Capabilities().Unit()}
	component, named, err := ComponentFromLabels(config.GetLabels(), n.ComponentPrefix)
	named = named && backend.Capabilities().Components
	if named && err != nil {
		return nil, err
	}
	key := podKey(config.GetMetadata())
	n.pool.mu.RLock()
	existing := n.pool.names[key]
	n.pool.mu.RUnlock()
	if existing != nil {
		return existing, nil
	}
	pod.ID = newID()
	if named {
		number, err := n.store.Next("instance")
		if err != nil {
			return nil, err
		}
		pod.Component, pod.ID = component.String(), component.Instance(number)
	}
	return n.pool.reserve(key, func() (*livePod, error) {
		if err := n.checkPodsPorts(pod); err != nil {
			return nil, err
		}
		if err := n.assignIDs(pod, backend.Capabilities()); err != nil {
			return nil, err
		}
		return n.newLivePod(pod, backend), nil
	})
}

// step runs a step of an order as a span.
func (p *livePod) step(ctx context.Context, name string, run func(context.Context) error) error {
	return spans.Run(ctx, name, run, spans.Pod(p.id), spans.String("tripod.handler", p.rec.Load().Handler))
}

// The backend's part of stops and removals, whichever order they belong to.

func (p *livePod) stopInBackend(ctx context.Context, rec *Pod, c *Container, grace time.Duration) error {
	return p.step(ctx, "backend.stop-container", func(ctx context.Context) error {
		return p.backendOf(c).StopContainer(ctx, rec.sandboxPod(), c.sandboxContainer(), grace)
	})
}

func (p *livePod) removeInBackend(ctx context.Context, rec *Pod, c *Container) error {
	return p.step(ctx, "backend.remove-container", func(ctx context.Context) error {
		return p.backendOf(c).RemoveContainer(ctx, rec.sandboxPod(), c.sandboxContainer())
	})
}

func (p *livePod) stopSandboxInBackend(ctx context.Context, rec *Pod) error {
	return p.step(ctx, "backend.stop-sandbox", func(ctx context.Context) error { return p.backend.StopSandbox(ctx, rec.sandboxPod()) })
}

func (p *livePod) removeSandboxInBackend(ctx context.Context, rec *Pod) error {
	return p.step(ctx, "backend.remove-sandbox", func(ctx context.Context) error { return p.backend.RemoveSandbox(ctx, rec.sandboxPod()) })
}

// newLivePod returns the pool's entry for a record.
func (n *Node) newLivePod(record *Pod, backend sandbox.Backend) *livePod {
	p := &livePod{
		node: n, id: record.ID, key: podKey(record.Config.GetMetadata()), backend: backend,
		slots: map[string]*slot{},
	}
	p.rec.Store(record)
	return p
}

// runSandbox implements RunPodSandbox inside the pod's slot.
func (p *livePod) runSandbox(ctx context.Context) error {
	switch rec := p.rec.Load(); {
	case p.isGone():
		return errPodGone
	case rec.State == "" && !rec.CreatedAt.IsZero():
		return errPodGone // its rollback failed and is retried; the name is free for a new pod
	case rec.State == Initiated && rec.Intent == "":
		return nil
	case rec.State != "":
		return fmt.Errorf("RunPodSandbox: sandbox %s has the same metadata and is stopping or stopped; remove it first: %w", p.id,
			errdefs.ErrAlreadyExists)
	}
	err := p.node.attempt(RunPodSandbox, func() error { return p.makeSandbox(ctx) })
	if err == nil {
		return nil
	}
	ctx, cancel := rollbackContext(ctx)
	defer cancel()
	return errors.Join(err, p.rollBackSandbox(ctx))
}

// makeSandbox records the intent, sets up the network, makes the sandbox in the backend and commits Initiated.
func (p *livePod) makeSandbox(ctx context.Context) error {
	rec := p.rec.Load()
	if err := p.backend.Validate(rec.sandboxPod(), nil); err != nil {
		return err
	}
	if err := checkProcessesPorts(rec.Config); err != nil {
		return err
	}
	if err := p.node.store.Reserve(); err != nil {
		return err
	}
	if err := p.intend(func(next *Pod) error { next.CreatedAt = time.Now(); return nil }); err != nil {
		return err
	}
	if err := failRunIntent.Hit(ctx); err != nil {
		return err
	}
	made := p.rec.Load().clone()
	if !hostNetwork(made.Config) {
		var result *network.Result
		err := p.step(ctx, "network.setup", func(ctx context.Context) (err error) {
			result, err = p.node.Network.Setup(ctx, p.attachment(made))
			return err
		})
		if err != nil {
			return fmt.Errorf("set up the pod's network: %w", err)
		}
		made.Netns, made.IPs = result.Netns, result.IPs
	}
	if err := failRunNetwork.Hit(ctx); err != nil {
		return err
	}
	err := p.step(ctx, "backend.create-sandbox", func(ctx context.Context) error { return p.backend.CreateSandbox(ctx, made.sandboxPod()) })
	if err != nil {
		return err
	}
	if err := p.node.Hooks.RunPod(ctx, made); err != nil {
		return err
	}
	if err := failRunBackend.Hit(ctx); err != nil {
		return err
	}
	err = p.commit(func(next *Pod) error {
		next.State, next.Intent, next.Netns, next.IPs = Initiated, "", made.Netns, made.IPs
		return nil
	})
	if err != nil {
		return err
	}
	return failRunCommit.Hit(ctx)
}

// rollBackSandbox undoes a partial RunPodSandbox and deletes its record. If the clean-up fails, the record stays so
// that the janitor can retry, but the pod's name becomes free.
func (p *livePod) rollBackSandbox(ctx context.Context) error {
	rec := p.rec.Load()
	if rec.State != "" {
		return nil // the sandbox was made; the failure came after the commit
	}
	if !rec.CreatedAt.IsZero() {
		err := p.node.attempt(RunPodSandbox, func() error {
			p.node.Hooks.RemovePod(ctx, rec)
			return errors.Join(p.removeSandboxInBackend(ctx, rec), p.releaseNetwork(ctx, rec))
		})
		if err != nil {
			p.node.pool.release(p)
			p.node.wakeJanitor()
			return fmt.Errorf("roll back sandbox %s, to be retried: %w", p.id, err)
		}
	}
	return p.forget()
}

// attachment describes the pod to the network, which makes the pod's network namespace unless the backend does.
func (p *livePod) attachment(rec *Pod) network.Attachment {
	a, pod := attachment(rec), rec.sandboxPod()
	if maker, ok := p.backend.(sandbox.NetnsMaker); ok && pod.IDMap() != nil {
		a.MakeNetns = func(pin string) error { return maker.MakeNetns(pod, pin) }
	}
	return a
}

// releaseNetwork detaches the pod from the network and frees its addresses.
func (p *livePod) releaseNetwork(ctx context.Context, rec *Pod) error {
	if hostNetwork(rec.Config) {
		return nil
	}
	err := p.step(ctx, "network.release", func(ctx context.Context) error { return p.node.Network.Teardown(ctx, attachment(rec)) })
	if err != nil {
		return fmt.Errorf("release the network of pod %s: %w", p.id, err)
	}
	return nil
}
