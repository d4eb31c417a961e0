package vm

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// UpdateContainer implements sandbox.Updater. It refuses a memory limit that the container could never reach.
func (o *OCI) UpdateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := o.ledger.Get(p.ID, c.ID)
	if err != nil {
		return err
	}
	pod, err := o.running(p.ID)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	granted := grantedTo(c)
	if granted.Memory > s.Granted.Memory { // a limit may be too high from the beginning
		if err := o.checkMemory(p, granted.Memory); err != nil {
			return fmt.Errorf("update container %s: %w", c.ID, err)
		}
	}
	if err := o.place(pod, p, map[string]ociGranted{c.ID: granted}); err != nil {
		return err
	}
	config := proto.CloneOf(c.Config)
	config.LogPath, config.Mounts = c.ID+".log", nil
	guestResources(config.GetLinux().GetResources())
	inner := guestapi.Container{Container: sandbox.Container{ID: c.ID, ImageID: c.ImageID, Config: config, Adjustment: c.Adjustment}}
	if err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodUpdate, Container: c.ID}, inner, nil); err != nil {
		return err
	}
	return h.Set(func(s *ociState) { s.Granted = granted })
}

// checkMemory refuses a container's limit in bytes that is more than its machine has for containers.
func (o *OCI) checkMemory(p *sandbox.Pod, limit int64) error {
	h, err := o.machines.ledger.Get(p.ID, p.ID)
	if err != nil {
		return fmt.Errorf("the pod's machine: %w", err)
	}
	s, _ := h.Snapshot()
	has := min(s.Definition.Memory, o.machines.memory(sandbox.Resources(o.machine(p))))
	if wholeMiB(uint64(limit))+guestOverhead > has {
		return fields.Unsupported("linux.resources.memory_limit_in_bytes",
			"%d is more than the %d bytes that the pod's machine has for containers; a machine gets more memory only when it starts", limit, has-min(guestOverhead, has))
	}
	return nil
}

// warnOfMemory warns of a container without a memory limit in a machine that was made for the limits of the pod.
func (o *OCI) warnOfMemory(p *sandbox.Pod, c *sandbox.Container) {
	limit := p.Config.GetLinux().GetResources().GetMemoryLimitInBytes()
	if limit <= 0 || c.Config.GetLinux().GetResources().GetMemoryLimitInBytes() > 0 {
		return
	}
	o.log.Warn("a container without a memory limit shares the memory of its pod's limits", "pod", p.ID, "container", c.ID,
		"reason", fmt.Sprintf("the machine has %s for containers, the sum of the limits that the pod has; set a memory limit for the pod or for each of its containers", quantity(uint64(limit))))
}

// UpdateSandbox implements sandbox.PodUpdater. It changes the machine's limits first, so that the guest never has more
// than the node gives. A machine that cannot have the memory gets the other resources.
func (o *OCI) UpdateSandbox(ctx context.Context, p *sandbox.Pod) error {
	pod, err := o.running(p.ID)
	if err != nil {
		return err
	}
	inner, err := guestPod(p)
	if err != nil {
		return err
	}
	mp, mc := o.machine(p)
	kept, err := o.updateMachine(ctx, mp, mc)
	if err != nil {
		return err
	}
	if res := inner.Config.GetLinux().GetResources(); kept != nil && res != nil {
		res.MemoryLimitInBytes, res.MemorySwapLimitInBytes = 0, 0 // the guest leaves its limits unchanged, too
	}
	if err := o.place(pod, p, nil); err != nil {
		return err
	}
	if err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodUpdatePod}, guestapi.Pod{Pod: *inner}, nil); err != nil {
		return err
	}
	return kept
}

// updateMachine changes a machine's limits. The first error says why its memory cannot change, if all others could.
func (o *OCI) updateMachine(ctx context.Context, mp *sandbox.Pod, mc *sandbox.Container) (kept, err error) {
	h, err := o.machines.ledger.Get(mp.ID, mc.ID)
	if err != nil {
		return nil, err
	}
	s, _ := h.Snapshot()
	present, err := o.machines.cgroups.MemoryLimit(s.Definition.Cgroup)
	if err != nil {
		return nil, err
	}
	err = o.machines.UpdateContainer(ctx, mp, mc)
	if overhead := o.machines.cfg.VM.MemoryOverhead; errdefs.IsNotImplemented(err) && present > overhead {
		return fmt.Errorf("%w: %w", sandbox.ErrMemoryKept, err), o.machines.limit(s.Definition.Cgroup, present-overhead, mc.Config.GetLinux().GetResources())
	}
	return nil, err
}
