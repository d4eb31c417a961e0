package unitpods

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// sweepPause is the maximum time between removals of unused pods and images.
const sweepPause = 15 * time.Second

// ownPods returns the pods of this runtime.
func (r *Runtime) ownPods() []*node.Pod {
	var pods []*node.Pod
	for _, p := range r.Node.Pods() {
		if p.Config.GetAnnotations()[keys.EdgeRuntime] == r.UUID {
			pods = append(pods, p)
		}
	}
	return pods
}

func moduleOf(p *node.Pod) string { return p.Config.GetAnnotations()[keys.EdgeModule] }

// removePrevious removes what an earlier daemon has left of a module: its pods and its log.
func (r *Runtime) removePrevious(ctx context.Context, uuid string) error {
	for _, p := range r.ownPods() {
		if moduleOf(p) != uuid {
			continue
		}
		if err := r.removePod(ctx, p.ID); err != nil {
			return err
		}
	}
	return removeLog(r.LogDir, key(uuid))
}

// removePod stops and removes a pod, if it exists. If the ID is "", removePod does nothing.
func (r *Runtime) removePod(ctx context.Context, id string) error {
	if id == "" {
		return nil
	}
	if err := r.Node.StopSandbox(ctx, id); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if err := r.Node.RemoveSandbox(ctx, id); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// Adopt implements runtime.Runtime. It also adopts a module that has meanwhile ended, and reports its end. If the exit
// is unknown, as after a reboot of the node, Adopt removes the module.
func (r *Runtime) Adopt(ctx context.Context, index int, data wire.ModuleData) (bool, error) {
	if err := data.Validate(); err != nil {
		return false, err
	}
	pod, c := r.podOf(data.UUID())
	if c == nil || c.State != node.Running && (c.State != node.Stopped || c.Reason == sandbox.ReasonUnknown) {
		return false, r.removePrevious(ctx, data.UUID())
	}
	m := r.newModule(index, data)
	if err := r.put(m); err != nil {
		return false, err
	}
	m.podID, m.channels = c.PodID, len(c.Channels) > 0
	log, err := newFollower(m, pod.Config.GetLogDirectory())
	if err != nil {
		r.drop(m)
		return false, err
	}
	m.log, m.image = log, c.ImageID
	r.files.join(m.image)
	if at, err := time.Parse(time.RFC3339Nano, c.Config.GetAnnotations()[keys.EdgeDeadline]); err == nil {
		m.deadline = at
	}
	m.watchPod()
	close(m.created)
	m.watch()
	r.checkAllPods() // the module may have ended before watchPod
	return true, nil
}

// podOf returns the pod and the container of a module. It returns nil if there is no pod with a container.
func (r *Runtime) podOf(uuid string) (*node.Pod, *node.Container) {
	for _, p := range r.ownPods() {
		if c := p.Container(p.ID); c != nil && moduleOf(p) == uuid {
			return p, c
		}
	}
	return nil, nil
}

// sweep removes unused pods and images periodically.
func (r *Runtime) sweep() {
	tick := time.NewTicker(min(sweepPause, r.OrphanAge, r.ImageIdle))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-r.ctx.Done():
			return
		}
		if err := r.removeOrphans(); err != nil && r.ctx.Err() == nil {
			r.log.Warn("cannot remove pods without a module; retrying", "err", err)
		}
		r.files.collect(r.ctx)
	}
}

// removeOrphans removes pods without a module. During the first OrphanAge after Start it does nothing, so that the
// manager can adopt the pods of an earlier daemon.
func (r *Runtime) removeOrphans() error {
	r.mu.Lock()
	early := time.Since(r.started) < r.OrphanAge
	r.mu.Unlock()
	if early {
		return nil
	}
	var errs []error
	for _, p := range r.ownPods() {
		uuid := moduleOf(p)
		if r.live(uuid) { // a module is in the tables before its pod is created
			continue
		}
		r.log.Warn("removing a pod without a module", "module", uuid, "pod", p.ID)
		errs = append(errs, r.removePod(r.ctx, p.ID))
	}
	return errors.Join(errs...)
}

// live reports whether a module with this uuid exists.
func (r *Runtime) live(uuid string) bool {
	return slices.ContainsFunc(r.all(), func(m *module) bool { return m.uuid == uuid })
}
