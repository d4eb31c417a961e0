package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// Recover implements sandbox.Backend.
func (o *Backend) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	o.ledger.ReportTo(sink)
	found := sandbox.NewFound()
	keep := map[string]bool{}
	var machines []sandbox.Known
	for _, k := range known {
		keep[k.Pod.ID] = true
		mp, mc := o.machine(k.Pod)
		machines = append(machines, sandbox.Known{Pod: mp, Containers: []*sandbox.Container{mc}, Stopped: k.Stopped})
	}
	have, err := o.machines.Recover(ctx, machines, o.machineEnded)
	if err != nil {
		return found, err
	}
	running := func(k sandbox.Known) bool { return have.Containers[k.Pod.ID].State == sandbox.StateRunning }
	says := make([]map[string]sandbox.Status, len(known))
	var asking sync.WaitGroup
	for i, k := range known { // all at once, because a guest may be slow to answer
		if running(k) {
			asking.Go(func() { says[i] = o.askStatuses(ctx, k) })
		}
	}
	asking.Wait()
	for i, k := range known {
		runs := running(k)
		if runs && have.Sandboxes[k.Pod.ID] {
			found.Sandboxes[k.Pod.ID] = true
		}
		for _, c := range k.Containers {
			status, err := o.recoverContainer(k.Pod, c, have.Containers[k.Pod.ID], says[i])
			if err != nil {
				return found, fmt.Errorf("container %s: %w", c.ID, err)
			}
			found.Add(c.ID, status)
		}
		if runs {
			o.adopt(k.Pod)
		}
	}
	if err := o.removeOrphans(ctx, keep); err != nil {
		o.log.Error("remove pods that are not in the record", "err", err)
	}
	return found, nil
}

// askStatuses returns what the guest says about its containers, or nil if the guest does not answer. It asks only if an
// order to start a container is recorded, because only then the record may not be true.
func (o *Backend) askStatuses(ctx context.Context, k sandbox.Known) map[string]sandbox.Status {
	for _, c := range k.Containers {
		h, err := o.ledger.Find(k.Pod.ID, c.ID)
		if err != nil || h == nil {
			continue
		}
		if s, l := h.Snapshot(); l != nil || s.Phase != ledger.Started {
			continue
		}
		says, err := o.statuses(ctx, k.Pod.ID)
		if err != nil {
			o.log.Warn("a guest does not say how its containers are; they count as running", "pod", k.Pod.ID, "err", err)
			return nil
		}
		return says
	}
	return nil
}

// recoverContainer returns the status of a container after a restart of the daemon. If the order to start it has not reached
// the guest, it can be started again. If it has ended, the watch of the guest will record that, with the end of its log.
func (o *Backend) recoverContainer(p *sandbox.Pod, c *sandbox.Container, machine sandbox.Status,
	says map[string]sandbox.Status) (sandbox.Status, error) {
	h, err := o.ledger.Find(p.ID, c.ID)
	if h == nil {
		return sandbox.Status{}, err
	}
	s, l := h.Snapshot()
	switch {
	case l != nil || s.Phase != ledger.Started:
	case machine.State != sandbox.StateRunning:
		end := endWithMachine(machine)
		err = h.Set(func(s *state) { s.Exit(plausibleEnd(end.FinishedAt), end.ExitCode, end.Reason, end.Message) })
	case says != nil && says[c.ID].State == sandbox.StateAbsent:
		err = h.Set(func(s *state) {
			s.Exit(time.Now(), sandbox.ExitUnknown, sandbox.ReasonUnknown, "the guest no longer knows the container")
		})
	case says != nil && says[c.ID].State == sandbox.StateCreated:
		err = h.Set(func(s *state) { s.Record = ledger.Record{ID: s.ID, Phase: ledger.Created} })
	default:
		l = o.newLife(p, c, false)
		h.Adopt(l)
		o.tasks.Go(guard.Func(o.log, "log of a container", func() { l.log.Follow(o.ctx, o.logOf(p.ID, c.ID)) }))
	}
	s, _ = h.Snapshot()
	return s.Status(), err
}

// removeOrphans removes what belongs to pods that are not to be kept. Their machines are already removed.
func (o *Backend) removeOrphans(ctx context.Context, keep map[string]bool) error {
	orphans := map[string]bool{}
	for _, dir := range []string{filepath.Dir(o.dir("x")), filepath.Join(o.cfg.Root, "oci")} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			orphans[e.Name()] = true
		}
	}
	leases, err := o.images.Disks(ctx)
	if err != nil {
		return err
	}
	for _, key := range leases {
		if pod, ok := podOfLease(key); ok {
			orphans[pod] = true
		}
	}
	var errs []error
	for id := range orphans {
		if cgroup.ID().MatchString(id) && !keep[id] {
			o.log.Info("removing a pod that is not in the record", "pod", id)
			errs = append(errs, o.removePod(ctx, id))
		}
	}
	return errors.Join(errs...)
}
