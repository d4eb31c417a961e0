package node

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Hooks follow and change the life of pods: they are the node's interface to plugins. *nri.Plugins implements it. The
// node calls each hook inside the slot of the pod or the container, so the hooks of one object are in order.
//
// An error of RunPod, UpdatePod, CreateContainer, StartContainer or UpdateContainer fails the order. All other hooks
// only report what happened.
type Hooks interface {
	// Active reports whether a plugin may be connected. If not, the node does no work for hooks that report an event.
	Active() bool

	// RunPod is called when the pod has its network and its sandbox, but nobody can see it yet.
	RunPod(ctx context.Context, p *Pod) error
	// UpdatePod is called before, and UpdatedPod after the pod's resources change.
	UpdatePod(ctx context.Context, p *Pod, overhead, resources *runtimeapi.LinuxContainerResources) error
	UpdatedPod(ctx context.Context, p *Pod)
	// StopPod is called when all containers have stopped and the sandbox still exists.
	StopPod(ctx context.Context, p *Pod)
	// RemovePod is called before the sandbox is removed, also by a rollback.
	RemovePod(ctx context.Context, p *Pod)

	// CreateContainer is called before the container is made. It sets c.Config and c.Adjustment. The parameter spec is the
	// container's OCI specification, whose adjustments the backend honours. It is nil if the backend has none; then the
	// adjustments must be such that the CRI can express them.
	CreateContainer(ctx context.Context, p *Pod, c *Container, spec *specs.Spec) error
	CreatedContainer(ctx context.Context, p *Pod, c *Container)
	StartContainer(ctx context.Context, p *Pod, c *Container) error
	StartedContainer(ctx context.Context, p *Pod, c *Container)
	// UpdateContainer returns the resources that replace the requested ones.
	UpdateContainer(ctx context.Context, p *Pod, c *Container,
		change *runtimeapi.LinuxContainerResources) (*runtimeapi.LinuxContainerResources, error)
	UpdatedContainer(ctx context.Context, p *Pod, c *Container)
	// StopContainer is called after the container has ended, for whatever reason. Repeated calls have no effect.
	StopContainer(ctx context.Context, p *Pod, c *Container)
	// RemoveContainer is called before the container is removed, also by a rollback.
	RemoveContainer(ctx context.Context, p *Pod, c *Container)
}

// noHooks is used without plugins.
type noHooks struct{}

func (noHooks) Active() bool                       { return false }
func (noHooks) RunPod(context.Context, *Pod) error { return nil }
func (noHooks) UpdatePod(context.Context, *Pod, *runtimeapi.LinuxContainerResources, *runtimeapi.LinuxContainerResources) error {
	return nil
}
func (noHooks) UpdatedPod(context.Context, *Pod)                                     {}
func (noHooks) StopPod(context.Context, *Pod)                                        {}
func (noHooks) RemovePod(context.Context, *Pod)                                      {}
func (noHooks) CreateContainer(context.Context, *Pod, *Container, *specs.Spec) error { return nil }
func (noHooks) CreatedContainer(context.Context, *Pod, *Container)                   {}
func (noHooks) StartContainer(context.Context, *Pod, *Container) error               { return nil }
func (noHooks) StartedContainer(context.Context, *Pod, *Container)                   {}
func (noHooks) UpdatedContainer(context.Context, *Pod, *Container)                   {}
func (noHooks) StopContainer(context.Context, *Pod, *Container)                      {}
func (noHooks) RemoveContainer(context.Context, *Pod, *Container)                    {}
func (noHooks) UpdateContainer(_ context.Context, _ *Pod, _ *Container,
	change *runtimeapi.LinuxContainerResources) (*runtimeapi.LinuxContainerResources, error) {
	return change, nil
}

// Records lists the pods, including those that are being made or removed, in order of creation.
func (n *Node) Records() []*Pod {
	live := n.pool.all()
	pods := make([]*Pod, 0, len(live))
	for _, p := range live {
		pods = append(pods, p.rec.Load())
	}
	return pods
}

// Spec returns a created container's OCI specification, or nil if its backend has none.
func (n *Node) Spec(p *Pod, c *Container) (*specs.Spec, error) {
	if s, ok := n.Backends[p.handlerOf(c)].(sandbox.Specifier); ok {
		return s.Spec(p.sandboxPod(), c.sandboxContainer())
	}
	return nil, nil
}

// createInBackend makes a container that the plugins may adjust before.
func (p *livePod) createInBackend(ctx context.Context, c *Container) (sandbox.Resolved, error) {
	pod, asked := p.rec.Load().sandboxPod(), c.sandboxContainer()
	adjust := func(ctx context.Context, spec *specs.Spec) (*sandbox.Container, error) {
		changed, err := p.adjustContainer(ctx, c, spec)
		if err != nil || !changed {
			return asked, err
		}
		return c.sandboxContainer(), nil
	}
	if s, ok := p.backendOf(c).(sandbox.Specifier); ok {
		return s.CreateSpecified(ctx, pod, asked, adjust)
	}
	made, err := adjust(ctx, nil)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	return p.backendOf(c).CreateContainer(ctx, pod, made)
}

// adjustContainer lets the plugins adjust a container that is to be made, and reports whether they did. If so, the container's
// request is kept, so that a repeated CreateContainer finds the container.
func (p *livePod) adjustContainer(ctx context.Context, c *Container, spec *specs.Spec) (bool, error) {
	requested, rec := c.Config, p.rec.Load()
	if err := p.node.Hooks.CreateContainer(ctx, rec, c, spec); err != nil {
		return false, err
	}
	if c.Config == requested {
		return false, nil
	}
	c.Request = requested
	return true, p.backendOf(c).Validate(rec.sandboxPod(), c.sandboxContainer())
}

// tell calls a hook that only reports, with the current records of the pod and the container.
func (p *livePod) tell(ctx context.Context, id string, hook func(context.Context, *Pod, *Container)) {
	rec := p.rec.Load()
	if c := rec.find(id); c != nil {
		hook(ctx, rec, c)
	}
}

// requested returns the configuration that clients asked for.
func (c *Container) requested() *runtimeapi.ContainerConfig {
	if c.Request != nil {
		return c.Request
	}
	return c.Config
}

// announceStops reports the containers that ended in a transition to the plugins, in the background, because an order
// can hold a container's slot. The order that stopped a container, or removes it, reports its end itself.
func (p *livePod) announceStops(old, next *Pod) {
	if !p.node.Hooks.Active() {
		return
	}
	for _, c := range next.Containers {
		was := old.find(c.ID)
		if c.State != Stopped || was == nil || (was.State != Starting && was.State != Running) {
			continue
		}
		announce := func() {
			err := p.slotOf(c.key()).run(context.Background(), p.node.order(announceStop), func(ctx context.Context) error {
				p.tell(ctx, c.ID, p.node.Hooks.StopContainer)
				return nil
			})
			if err != nil {
				p.node.log.Warn("cannot report a container's end to the plugins", "container", c.ID, "err", err)
			}
		}
		go guard.Func(p.node.log, "report of a container's end", announce)()
	}
}

// announceStop is the order that reports a container's end to the plugins.
const announceStop Call = "report of a container's end"

// encodeAdjustment and decodeAdjustment convert an adjustment from and to its stored form.
func encodeAdjustment(a *nri.ContainerAdjustment) ([]byte, error) {
	if a == nil {
		return nil, nil
	}
	return proto.Marshal(a)
}

func decodeAdjustment(raw []byte) (*nri.ContainerAdjustment, error) {
	if raw == nil {
		return nil, nil
	}
	a := &nri.ContainerAdjustment{}
	return a, proto.Unmarshal(raw, a)
}
