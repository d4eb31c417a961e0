package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
)

var (
	failRunIntent  = failpoint.New("node.run-sandbox.intent")
	failRunNetwork = failpoint.New("node.run-sandbox.network")
	failRunBackend = failpoint.New("node.run-sandbox.backend")
	failRunCommit  = failpoint.New("node.run-sandbox.commit")
)

// RunSandbox makes a pod sandbox (CRI RunPodSandbox) and returns its ID once its network is up. A repeat with the
// same metadata returns the same ID while that sandbox is ready. Errors: ErrInvalidArgument, ErrNotImplemented (the
// backend cannot honour a field), ErrAlreadyExists (a stopped sandbox has that metadata), ErrUnavailable.
func (n *Node) RunSandbox(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	if config.GetMetadata() == nil {
		return "", fmt.Errorf("the sandbox has no metadata: %w", errdefs.ErrInvalidArgument)
	}
	asked := n.routed(handler, config)
	handler, backend, err := n.backend(asked)
	if err != nil {
		return "", err
	}
	alias := ""
	if n.Aliases[asked] != "" {
		alias = asked
	}
	for {
		p, err := n.reserve(config, handler, alias, backend)
		if err != nil {
			return "", err
		}
		err = p.slot.run(ctx, n.order(RunPodSandbox), p.runSandbox)
		if !errors.Is(err, errPodGone) {
			return p.id, err
		}
	}
}

// errPodGone is met by an order that waited for a pod while it was rolled back or removed.
var errPodGone = fmt.Errorf("the pod is gone: %w", errdefs.ErrNotFound)

// reserve finds the pod that has the metadata of config or puts a new one into the pool under that name.
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
	return n.pool.reserve(key, func() *livePod { return n.live(pod, backend) }), nil
}

// live makes the pool's entry of a record.
func (n *Node) live(record *Pod, backend sandbox.Backend) *livePod {
	p := &livePod{
		node: n, id: record.ID, key: podKey(record.Config.GetMetadata()), backend: backend,
		slots: map[string]*slot{}, exits: map[string]sandbox.Status{},
	}
	p.rec.Store(record)
	return p
}

// runSandbox is RunPodSandbox in the pod's slot.
func (p *livePod) runSandbox(ctx context.Context) error {
	switch rec := p.rec.Load(); {
	case p.isGone():
		return errPodGone
	case rec.State == "" && !rec.CreatedAt.IsZero():
		return errPodGone // its roll-back failed and is retried; the name is free for another
	case rec.State == Initiated && rec.Intent == "":
		return nil
	case rec.State != "":
		return fmt.Errorf("RunPodSandbox: a sandbox with the same metadata is being stopped or is stopped: %s; remove it first: %w", p.id, errdefs.ErrAlreadyExists)
	}
	err := p.makeSandbox(ctx)
	if err == nil {
		return nil
	}
	ctx, cancel := undo(ctx)
	defer cancel()
	return errors.Join(err, p.unmakeSandbox(ctx))
}

// makeSandbox goes from nothing to Initiated: intent, network, the backend's part, commit.
func (p *livePod) makeSandbox(ctx context.Context) error {
	rec := p.rec.Load()
	if err := p.backend.Validate(rec.sandboxPod(), nil); err != nil {
		return err
	}
	if err := p.node.store.Reserve(); err != nil {
		return err
	}
	if err := p.commit(func(next *Pod) error { next.CreatedAt = time.Now(); return nil }); err != nil {
		return err
	}
	if err := failRunIntent.Hit(ctx); err != nil {
		return err
	}
	made := p.rec.Load().clone()
	if !hostNetwork(made.Config) {
		result, err := p.node.Network.Setup(ctx, attachment(made))
		if err != nil {
			return fmt.Errorf("set up the pod's network: %w", err)
		}
		made.Netns, made.IPs = result.Netns, result.IPs
	}
	if err := failRunNetwork.Hit(ctx); err != nil {
		return err
	}
	if err := p.backend.CreateSandbox(ctx, made.sandboxPod()); err != nil {
		return err
	}
	if err := failRunBackend.Hit(ctx); err != nil {
		return err
	}
	err := p.commit(func(next *Pod) error {
		next.State, next.Intent, next.Netns, next.IPs = Initiated, "", made.Netns, made.IPs
		return nil
	})
	if err != nil {
		return err
	}
	return failRunCommit.Hit(ctx)
}

// unmakeSandbox rolls a half-made sandbox back and forgets it. When that fails the record stays, for the janitor,
// and the name is free again.
func (p *livePod) unmakeSandbox(ctx context.Context) error {
	rec := p.rec.Load()
	if rec.State != "" {
		return nil // it was made: only what came after the commit failed
	}
	if !rec.CreatedAt.IsZero() {
		if err := errors.Join(p.backend.RemoveSandbox(ctx, rec.sandboxPod()), p.releaseNetwork(ctx, rec)); err != nil {
			p.node.pool.release(p)
			p.node.wakeJanitor()
			return fmt.Errorf("roll back sandbox %s, to be retried: %w", p.id, err)
		}
	}
	return p.forget()
}

// releaseNetwork takes the pod off the network and frees its addresses.
func (p *livePod) releaseNetwork(ctx context.Context, rec *Pod) error {
	if hostNetwork(rec.Config) {
		return nil
	}
	if err := p.node.Network.Teardown(ctx, attachment(rec)); err != nil {
		return fmt.Errorf("release the network of pod %s: %w", p.id, err)
	}
	return nil
}
