package vm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Recover implements sandbox.Backend. It compares what the driver knows about the machines with the orders recorded in
// the files.
func (b *Backend) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	b.ledger.ReportTo(sink)
	found := sandbox.NewFound()
	keep := map[string]bool{}
	names := make([]string, 0, len(known))
	for _, k := range known {
		keep[k.Pod.ID] = true
		names = append(names, k.Pod.ID)
		for _, c := range k.Containers {
			// Load the container before the driver can report that its machine has ended.
			if _, err := b.ledger.Find(k.Pod.ID, c.ID); err != nil {
				return found, err
			}
		}
	}
	machines, err := b.cfg.Driver.Recover(ctx, names, b.machineEnded)
	if err != nil {
		return found, b.driverError(err)
	}
	for _, k := range known {
		if err := b.recoverPod(ctx, k, machines, &found); err != nil {
			return found, b.driverError(err)
		}
	}
	if err := b.removeOrphans(ctx, keep); err != nil {
		// Recover does not return this error, because orphans do not harm the known pods.
		b.log.Error("cannot remove pods that are not in the record", "err", err)
	}
	return found, nil
}

// driverError adds the driver's name to err. If the driver cannot reach libvirtd, driverError also adds
// sandbox.ErrAway.
func (b *Backend) driverError(err error) error {
	err = fmt.Errorf("driver %s: %w", b.cfg.Driver.Name(), err)
	if errdefs.IsUnavailable(err) {
		return fmt.Errorf("%w: %w", err, sandbox.ErrAway)
	}
	return err
}

// recoverPod recovers a pod and its container, and adds them to the result of Recover.
func (b *Backend) recoverPod(ctx context.Context, k sandbox.Known, machines map[string]machine.State, found *sandbox.Found) error {
	for _, c := range k.Containers {
		status, err := b.recoverContainer(ctx, k.Pod, c, machines)
		if err != nil {
			return fmt.Errorf("container %s: %w", c.ID, err)
		}
		found.Add(c.ID, status)
	}
	sb, err := b.sandbox(k.Pod.ID)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if sb == nil || !sb.state.Made || k.Stopped {
		return nil // not completely made, lost in a reboot, or stopped
	}
	interfaces, err := b.cfg.Network.Read(b.cfg.tapsFile(k.Pod.ID))
	if err == nil {
		err = b.serve(ctx, sb, k.Pod, interfaces)
	}
	if err != nil {
		b.log.Warn("pod network is gone", "pod", k.Pod.ID, "err", err)
		return nil
	}
	found.Sandboxes[k.Pod.ID] = true
	return nil
}

// recoverContainer returns the status of a container after a restart of the daemon.
func (b *Backend) recoverContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container,
	machines map[string]machine.State) (sandbox.Status, error) {
	h, err := b.ledger.Find(p.ID, c.ID)
	if h == nil {
		return sandbox.Status{}, err // not completely made, or lost in a reboot
	}
	actual, ok := machines[c.ID]
	s, l := h.Snapshot()
	switch {
	case l != nil: // recovered by an earlier call
	case s.Phase == ledger.Started:
		if !ok {
			actual = machine.State{Phase: machine.Ended, Cause: machine.CauseUnknown, Message: "the driver no longer knows the machine"}
		}
		if err := b.recoverStarted(h, p, c, actual); err != nil {
			return sandbox.Status{}, err
		}
	case actual.Phase == machine.Running:
		b.log.Error("killing a machine that runs without an order", "container", c.ID, "phase", s.Phase)
		if err := b.cfg.Driver.Destroy(ctx, c.ID); err != nil {
			return sandbox.Status{}, err
		}
	}
	s, _ = h.Snapshot()
	return s.Status(), nil
}

// recoverStarted recovers a container in the phase Started. actual is the state of its machine. If the driver never
// received the order to start the machine, the container returns to the phase Created.
func (b *Backend) recoverStarted(h *handle, p *sandbox.Pod, c *sandbox.Container, actual machine.State) error {
	s, _ := h.Snapshot()
	if actual.Phase == machine.Defined ||
		actual.Phase == machine.Ended && !actual.StartedAt.IsZero() && actual.StartedAt.Equal(s.PreviousStart) {
		return h.Set(func(s *state) { s.Phase, s.StartedAt = ledger.Created, s.PreviousStart })
	}
	l, err := b.openLife(p, c, h)
	if err != nil {
		return err
	}
	h.Adopt(l)
	if actual.Phase == machine.Ended {
		b.record(h, l, actual)
		return nil
	}
	if _, err := b.booted(h, l, actual); err != nil {
		return err
	}
	if s.Renew {
		b.tasks.Go(guard.Func(b.log, "guest from a template", func() { b.renewLate(h, l) }))
	}
	return nil
}

// removeOrphans removes the pods that have a directory or an image lease but are not among the pods to keep. The driver
// has already removed the machines of such pods.
func (b *Backend) removeOrphans(ctx context.Context, keep map[string]bool) error {
	orphans := map[string]bool{}
	for _, dir := range []string{b.cfg.podsDir(), b.cfg.disksDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if cgroup.ID().MatchString(e.Name()) && !keep[e.Name()] {
				orphans[e.Name()] = true
			}
		}
	}
	leased, err := b.cfg.Images.Disks(ctx)
	if err != nil {
		return err
	}
	for _, key := range leased {
		if cgroup.ID().MatchString(key) && !keep[key] {
			orphans[key] = true
		}
	}
	var errs []error
	for id := range orphans {
		b.log.Info("removing a pod that is not in the record", "pod", id)
		var s podState
		if err := format.Read(b.cfg.podFile(id), &s); err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, err)
			continue
		}
		s.ID = id
		errs = append(errs, b.removeSandbox(ctx, s))
	}
	return errors.Join(append(errs, b.cgroups.RemoveSlices(ctx, b.cfg.Prefix, keep))...)
}
