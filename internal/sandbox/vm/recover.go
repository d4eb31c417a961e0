package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// hexID is the form of the IDs of pods.
var hexID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Recover implements sandbox.Backend. The driver knows what runs; the files know what was ordered.
func (b *Backend) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	b.ledger.ReportTo(sink)
	found := sandbox.NewFound()
	keep := map[string]bool{}
	names := make([]string, 0, len(known))
	for _, k := range known {
		keep[k.Pod.ID] = true
		names = append(names, k.Pod.ID)
		for _, c := range k.Containers {
			// In memory before the driver can report its end.
			if _, err := b.ledger.Find(k.Pod.ID, c.ID); err != nil {
				return found, err
			}
		}
	}
	machines, err := b.cfg.Driver.Recover(ctx, names, b.machineEnded)
	if err != nil {
		return found, b.away(err)
	}
	for _, k := range known {
		if err := b.recoverPod(ctx, k, machines, &found); err != nil {
			return found, b.away(err)
		}
	}
	if err := b.removeOrphans(ctx, keep); err != nil {
		// What cannot be removed now does no harm to the pods that are known.
		b.log.Error("remove what is not in the record", "err", err)
	}
	return found, nil
}

// away says of an error of Recover whether it is that the driver cannot reach who runs the machines.
func (b *Backend) away(err error) error {
	err = fmt.Errorf("driver %s: %w", b.cfg.Driver.Name(), err)
	if errdefs.IsUnavailable(err) {
		return fmt.Errorf("%w: %w", err, sandbox.ErrAway)
	}
	return err
}

// recoverPod takes over a pod with its container.
func (b *Backend) recoverPod(ctx context.Context, k sandbox.Known, machines map[string]machine.State, found *sandbox.Found) error {
	for _, c := range k.Containers {
		status, err := b.recoverContainer(ctx, k.Pod, c, machines)
		if err != nil {
			return fmt.Errorf("container %s: %w", c.ID, err)
		}
		found.Add(c.ID, status)
	}
	at, err := b.sandbox(k.Pod.ID)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if at == nil || !at.state.Made {
		return nil // half made, or gone with a reboot
	}
	interfaces, err := b.cfg.Network.Read(b.cfg.tapsFile(k.Pod.ID))
	if err == nil {
		err = b.serve(ctx, at, k.Pod, interfaces)
	}
	if err != nil {
		b.log.Warn("the network of a vm pod is not there any more", "pod", k.Pod.ID, "err", err)
		return nil
	}
	found.Sandboxes[k.Pod.ID] = true
	return nil
}

// recoverContainer finds out what became of a container while nobody looked.
func (b *Backend) recoverContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, machines map[string]machine.State) (sandbox.Status, error) {
	h, err := b.ledger.Find(p.ID, c.ID)
	if h == nil {
		return sandbox.Status{}, err // half made, or gone with a reboot
	}
	now, there := machines[c.ID]
	s, l := h.Snapshot()
	switch {
	case l != nil: // taken over by an earlier try
	case s.Phase == ledger.Started:
		if !there {
			now = machine.State{Phase: machine.Ended, Cause: machine.CauseUnknown, Message: "the driver knows nothing of it any more"}
		}
		if err := b.recoverStarted(h, p, c, now); err != nil {
			return sandbox.Status{}, err
		}
	case now.Phase == machine.Running:
		b.log.Error("a machine runs that was not ordered to; killing it", "container", c.ID, "phase", s.Phase)
		if err := b.cfg.Driver.Destroy(ctx, c.ID); err != nil {
			return sandbox.Status{}, err
		}
	}
	s, _ = h.Snapshot()
	return s.Status(), nil
}

// recoverStarted decides about a container whose machine was about to be started when it was last heard of.
func (b *Backend) recoverStarted(h *handle, p *sandbox.Pod, c *sandbox.Container, now machine.State) error {
	s, _ := h.Snapshot()
	if now.Phase == machine.Defined || now.Phase == machine.Ended && !now.StartedAt.IsZero() && now.StartedAt.Equal(s.Former) {
		return h.Set(func(s *state) { s.Phase, s.StartedAt = ledger.Created, s.Former }) // the driver was never told
	}
	l, err := b.openLife(p, c, h)
	if err != nil {
		return err
	}
	h.Adopt(l)
	if now.Phase == machine.Ended {
		b.record(h, l, now)
		return nil
	}
	_, err = b.booted(h, l, now)
	return err
}

// removeOrphans removes what is in our directories, and leased for us, and belongs to no pod of the record. The driver has done
// the same for its machines.
func (b *Backend) removeOrphans(ctx context.Context, keep map[string]bool) error {
	orphans := map[string]bool{}
	for _, dir := range []string{b.cfg.podsDir(), b.cfg.disksDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if hexID.MatchString(e.Name()) && !keep[e.Name()] {
				orphans[e.Name()] = true
			}
		}
	}
	leased, err := b.cfg.Images.Disks(ctx)
	if err != nil {
		return err
	}
	for _, key := range leased {
		if hexID.MatchString(key) && !keep[key] {
			orphans[key] = true
		}
	}
	var errs []error
	for id := range orphans {
		b.log.Info("removing a vm pod that is not in the record", "pod", id)
		var s podState
		if err := format.Read(b.cfg.podFile(id), &s); err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, err)
			continue
		}
		s.ID = id
		errs = append(errs, b.removeSandbox(ctx, s))
	}
	return errors.Join(errs...)
}
