package nri

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/node"
)

// RunPod implements node.Hooks. If a plugin refuses the pod, those that accepted it learn of its end.
func (x *Plugins) RunPod(ctx context.Context, p *node.Pod) error {
	if !x.started.Load() {
		return nil
	}
	leave, err := x.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	x.known[p.ID] = &subject{}
	if x.connected.Load() == 0 {
		return nil
	}
	if err := x.adaptation.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: podMessage(p)}); err != nil {
		x.removePod(ctx, p)
		return refused(node.RunPodSandbox, err)
	}
	return nil
}

// refused returns the error for an order that a plugin refused, or did not answer although its policy is to refuse then.
func refused(call node.Call, err error) error {
	return fmt.Errorf("%s: refused by a node plugin (NRI): %w: %w", call, err, errdefs.ErrFailedPrecondition)
}

// UpdatePod implements node.Hooks.
func (x *Plugins) UpdatePod(ctx context.Context, p *node.Pod, overhead, resources *runtimeapi.LinuxContainerResources) error {
	if !x.Active() {
		return nil
	}
	leave, err := x.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	_, err = x.adaptation.UpdatePodSandbox(ctx, &api.UpdatePodSandboxRequest{
		Pod: podMessage(p), OverheadLinuxResources: resourcesMessage(overhead), LinuxResources: resourcesMessage(resources),
	})
	if err != nil {
		return refused("UpdatePodSandboxResources", err)
	}
	return nil
}

// UpdatedPod implements node.Hooks.
func (x *Plugins) UpdatedPod(ctx context.Context, p *node.Pod) {
	x.report(ctx, p.ID, "PostUpdatePodSandbox", func(ctx context.Context) error {
		return x.adaptation.PostUpdatePodSandbox(ctx, &api.PostUpdatePodSandboxRequest{Pod: podMessage(p)})
	})
}

// StopPod implements node.Hooks. It reports the ends of the pod's containers first, if that has not happened yet.
func (x *Plugins) StopPod(ctx context.Context, p *node.Pod) {
	x.change(ctx, p.ID, func(ctx context.Context, _ *subject) {
		for _, c := range p.Containers {
			if c.State == node.Stopped {
				x.stopContainer(ctx, p, c)
			}
		}
		x.stopPod(ctx, p)
	})
}

func (x *Plugins) stopPod(ctx context.Context, p *node.Pod) {
	s := x.known[p.ID]
	if s.stopped {
		return
	}
	s.stopped = true
	if x.connected.Load() > 0 {
		x.failed(p.ID, "StopPodSandbox", x.adaptation.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: podMessage(p)}))
	}
}

// RemovePod implements node.Hooks.
func (x *Plugins) RemovePod(ctx context.Context, p *node.Pod) {
	x.change(ctx, p.ID, func(ctx context.Context, _ *subject) { x.removePod(ctx, p) })
}

func (x *Plugins) removePod(ctx context.Context, p *node.Pod) {
	x.stopPod(ctx, p)
	delete(x.known, p.ID)
	if x.connected.Load() > 0 {
		x.failed(p.ID, "RemovePodSandbox", x.adaptation.RemovePodSandbox(ctx, &api.RemovePodSandboxRequest{Pod: podMessage(p)}))
	}
}

// CreateContainer implements node.Hooks. If a plugin refuses the container, or if an adjustment is impossible, the
// plugins learn of the container's end.
func (x *Plugins) CreateContainer(ctx context.Context, p *node.Pod, c *node.Container, spec *specs.Spec) error {
	if !x.started.Load() {
		return nil
	}
	answer, err := x.createContainer(ctx, p, c, spec)
	if err != nil || answer == nil {
		return err
	}
	x.update(ctx, answer.GetUpdate())
	x.evict(answer.GetEvict())
	return nil
}

func (x *Plugins) createContainer(ctx context.Context, p *node.Pod, c *node.Container,
	spec *specs.Spec) (*api.CreateContainerResponse, error) {
	leave, err := x.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	s := &subject{}
	x.known[c.ID] = s
	if x.connected.Load() == 0 {
		return nil, nil
	}
	s.creating = containerMessage(c, spec)
	answer, err := x.adaptation.CreateContainer(ctx, &api.CreateContainerRequest{Pod: podMessage(p), Container: containerMessage(c, spec)})
	if err != nil {
		err = refused(node.CreateContainer, err)
	} else {
		err = adjust(c, answer.GetAdjust(), spec != nil)
	}
	if err != nil {
		x.removeContainer(ctx, p, c)
		return nil, err
	}
	return answer, nil
}

// CreatedContainer implements node.Hooks.
func (x *Plugins) CreatedContainer(ctx context.Context, p *node.Pod, c *node.Container) {
	x.change(ctx, c.ID, func(ctx context.Context, s *subject) {
		s.creating = nil
		if x.connected.Load() > 0 {
			x.failed(c.ID, "PostCreateContainer", x.adaptation.PostCreateContainer(ctx, &api.PostCreateContainerRequest{
				Pod: podMessage(p), Container: x.describe(p, c, s),
			}))
		}
	})
}

// StartContainer implements node.Hooks.
func (x *Plugins) StartContainer(ctx context.Context, p *node.Pod, c *node.Container) error {
	if !x.started.Load() {
		return nil
	}
	leave, err := x.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	x.known[c.ID] = &subject{} // a stopped container can start again
	if x.connected.Load() == 0 {
		return nil
	}
	err = x.adaptation.StartContainer(ctx, &api.StartContainerRequest{Pod: podMessage(p), Container: x.describe(p, c, nil)})
	if err != nil {
		return refused(node.StartContainer, err)
	}
	return nil
}

// StartedContainer implements node.Hooks.
func (x *Plugins) StartedContainer(ctx context.Context, p *node.Pod, c *node.Container) {
	x.report(ctx, c.ID, "PostStartContainer", func(ctx context.Context) error {
		return x.adaptation.PostStartContainer(ctx, &api.PostStartContainerRequest{Pod: podMessage(p), Container: x.describe(p, c, nil)})
	})
}

// UpdateContainer implements node.Hooks.
func (x *Plugins) UpdateContainer(ctx context.Context, p *node.Pod, c *node.Container,
	change *runtimeapi.LinuxContainerResources) (*runtimeapi.LinuxContainerResources, error) {
	if !x.Active() {
		return change, nil
	}
	answer, err := x.askForUpdate(ctx, p, c, change)
	if err != nil {
		return nil, err
	}
	x.evict(answer.GetEvict())
	others := answer.GetUpdate()
	if len(others) == 0 {
		return change, nil
	}
	own := others[len(others)-1] // the library puts the container itself last, and nil if no plugin changed it
	x.update(ctx, others[:len(others)-1])
	if own == nil {
		return change, nil
	}
	decided, rest := split(own.GetLinux().GetResources())
	if err := none("linux.resources", rest); err != nil {
		return nil, err
	}
	return node.MergeResources(change, decided), nil
}

func (x *Plugins) askForUpdate(ctx context.Context, p *node.Pod, c *node.Container,
	change *runtimeapi.LinuxContainerResources) (*api.UpdateContainerResponse, error) {
	leave, err := x.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	answer, err := x.adaptation.UpdateContainer(ctx, &api.UpdateContainerRequest{
		Pod: podMessage(p), Container: x.describe(p, c, nil), LinuxResources: resourcesMessage(change),
	})
	if err != nil {
		return nil, refused("UpdateContainerResources", err)
	}
	return answer, nil
}

// UpdatedContainer implements node.Hooks.
func (x *Plugins) UpdatedContainer(ctx context.Context, p *node.Pod, c *node.Container) {
	x.report(ctx, c.ID, "PostUpdateContainer", func(ctx context.Context) error {
		return x.adaptation.PostUpdateContainer(ctx, &api.PostUpdateContainerRequest{Pod: podMessage(p), Container: x.describe(p, c, nil)})
	})
}

// StopContainer implements node.Hooks.
func (x *Plugins) StopContainer(ctx context.Context, p *node.Pod, c *node.Container) {
	x.change(ctx, c.ID, func(ctx context.Context, _ *subject) { x.stopContainer(ctx, p, c) })
}

// stopContainer reports the end of a container once. Updates in the answer are for other containers.
func (x *Plugins) stopContainer(ctx context.Context, p *node.Pod, c *node.Container) {
	s := x.known[c.ID]
	if s == nil || s.stopped {
		return
	}
	s.stopped = true
	if x.connected.Load() == 0 {
		return
	}
	answer, err := x.adaptation.StopContainer(ctx, &api.StopContainerRequest{Pod: podMessage(p), Container: x.describe(p, c, s)})
	x.failed(c.ID, "StopContainer", err)
	if updates := answer.GetUpdate(); len(updates) > 0 {
		x.inBackground("updates after a container's end", func() { x.update(context.Background(), updates) })
	}
}

// RemoveContainer implements node.Hooks.
func (x *Plugins) RemoveContainer(ctx context.Context, p *node.Pod, c *node.Container) {
	x.change(ctx, c.ID, func(ctx context.Context, _ *subject) { x.removeContainer(ctx, p, c) })
}

func (x *Plugins) removeContainer(ctx context.Context, p *node.Pod, c *node.Container) {
	x.stopContainer(ctx, p, c)
	s := x.known[c.ID]
	delete(x.known, c.ID)
	if x.connected.Load() > 0 {
		x.failed(c.ID, "RemoveContainer",
			x.adaptation.RemoveContainer(ctx, &api.RemoveContainerRequest{Pod: podMessage(p), Container: x.describe(p, c, s)}))
	}
}

// change calls do for a pod or container that plugins know. Once it has its turn, it no longer depends on its caller:
// each plugin has its own timeout, and either all plugins learn of the event or none.
func (x *Plugins) change(ctx context.Context, id string, do func(context.Context, *subject)) {
	if !x.started.Load() {
		return
	}
	leave, err := x.enter(ctx)
	if err != nil {
		x.log.Warn("plugins learn of an event later", "id", id, "err", err)
		return
	}
	defer leave()
	if s := x.known[id]; s != nil {
		do(context.WithoutCancel(ctx), s)
	}
}

// report calls the plugins, if there are any, about a pod or container that they know.
func (x *Plugins) report(ctx context.Context, id, call string, do func(context.Context) error) {
	if !x.Active() {
		return
	}
	x.change(ctx, id, func(ctx context.Context, _ *subject) { x.failed(id, call, do(ctx)) })
}

// failed logs the error of a call that only reports.
func (x *Plugins) failed(id, call string, err error) {
	if err != nil {
		x.log.Warn("a plugin failed to handle an event", "call", call, "id", id, "err", err)
	}
}

func (x *Plugins) inBackground(what string, do func()) { go guard.Func(x.log, what, do)() }
