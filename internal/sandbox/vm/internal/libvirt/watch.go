package libvirt

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/internal/stats"
)

const (
	// refreshTimeout bounds a query of a domain. refreshRetry is the pause after a failed query.
	refreshTimeout, refreshRetry = 10 * time.Second, 5 * time.Second
	// noticeTimeout bounds the time until libvirtd notices that its child process has ended.
	noticeTimeout = 5 * time.Second
	// noticeInterval is the interval between queries during noticeTimeout. The queries are a fallback: libvirtd also sends
	// an event.
	noticeInterval = 200 * time.Millisecond

	// shareLossGrace is how long the driver waits for QEMU's end after the end of a virtiofsd. If QEMU ends within this
	// time, no share was lost, because every virtiofsd ends when its QEMU ends.
	shareLossGrace = time.Second

	killedMessage = "killed"
)

// refreshAll queries every running machine after a connect, because events may have been missed.
func (d *Driver) refreshAll(ctx context.Context) {
	d.mu.Lock()
	all := slices.Collect(maps.Values(d.machines))
	d.mu.Unlock()
	for _, in := range all {
		d.refresh(ctx, in)
	}
}

// domainEvent is called for each event of a domain. It queries the state of the machine.
func (d *Driver) domainEvent(domain string) {
	name, ours := strings.CutPrefix(domain, namePrefix)
	in, err := d.find(name)
	if !ours || err != nil {
		return
	}
	d.bg.Go(func() { d.refresh(d.ctx, in) })
}

// refresh queries the state of a running machine, and finishes the run if the machine has ended.
func (d *Driver) refresh(ctx context.Context, in *instance) {
	in.mu.Lock()
	domain, idle, ended := in.domain, in.state.Phase != machine.Running || in.launch != nil, in.ended
	in.mu.Unlock()
	if idle {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	c, err := d.link.domainStatus(ctx, domain)
	switch {
	case errdefs.IsNotFound(err):
		d.finish(in, ended, machine.CauseUnknown, "the domain no longer exists in libvirt")
	case err != nil:
		d.retryRefresh(in, err)
	case c.state == golibvirt.DomainCrashed:
		d.panicked(ctx, in, domain)
	case !c.active():
		cause, message := in.causeOf(c.reason)
		d.finish(in, ended, cause, message)
	}
}

// retryRefresh queries a machine again after refreshRetry. A libvirtd that has just restarted may need time before it
// answers, and it sends no events for what happened while it was down.
func (d *Driver) retryRefresh(in *instance, why error) {
	in.mu.Lock()
	pending, domain := in.retryPending, in.domain.Name
	in.retryPending = true
	in.mu.Unlock()
	if pending {
		return
	}
	d.log.Warn("querying a machine failed", "domain", domain, "err", why)
	d.bg.Go(func() {
		select {
		case <-time.After(refreshRetry):
		case <-d.ctx.Done():
			return
		}
		in.mu.Lock()
		in.retryPending = false
		in.mu.Unlock()
		d.refresh(d.ctx, in)
	})
}

// panicked ends a machine whose guest has panicked. Until this call, libvirt keeps the domain in the crashed state.
func (d *Driver) panicked(ctx context.Context, in *instance, domain golibvirt.Domain) {
	in.mu.Lock()
	in.run.Panicked = true
	err := in.run.save(in.def.StateDir)
	proc, ended := in.proc, in.ended
	in.mu.Unlock()
	if err != nil {
		d.log.Warn("recording a guest's panic failed", "domain", domain.Name, "err", err)
	}
	if _, err := d.destroyDomain(ctx, domain, proc); err != nil {
		d.log.Warn("ending a machine after its guest's panic failed", "domain", domain.Name, "err", err)
		return
	}
	cause, message := in.causeOf(int32(golibvirt.DomainShutoffDestroyed))
	d.finish(in, ended, cause, message)
}

// causeOf returns the cause of a run's end, from libvirt's reason and the record.
func (in *instance) causeOf(reason int32) (cause machine.Cause, message string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.run.Panicked {
		return machine.CausePanic, "the guest's kernel panicked"
	}
	if in.run.Lost != "" && golibvirt.DomainShutoffReason(reason) != golibvirt.DomainShutoffShutdown {
		if in.oomKilled() {
			return machine.CauseOOM, "the pod ran out of memory: " + in.run.Lost
		}
		return machine.CauseFailed, in.run.Lost
	}
	switch golibvirt.DomainShutoffReason(reason) {
	case golibvirt.DomainShutoffShutdown:
		return machine.CausePowerOff, "the guest turned itself off"
	case golibvirt.DomainShutoffDestroyed:
		if in.run.Killing {
			return machine.CauseKilled, killedMessage
		}
		return machine.CauseFailed, "another client of libvirt destroyed the domain"
	case golibvirt.DomainShutoffCrashed, golibvirt.DomainShutoffFailed:
		if in.oomKilled() {
			return machine.CauseOOM, "QEMU was killed: the pod ran out of memory"
		}
		if in.run.Killing {
			return machine.CauseKilled, killedMessage
		}
		return machine.CauseFailed, "QEMU ended by itself or by a signal; see libvirt's log of the domain"
	case golibvirt.DomainShutoffSaved, golibvirt.DomainShutoffMigrated, golibvirt.DomainShutoffFromSnapshot, golibvirt.DomainShutoffDaemon:
		return machine.CauseFailed, fmt.Sprintf("another client of libvirt ended the domain (libvirt's reason %d)", reason)
	default:
		return machine.CauseUnknown, "libvirt does not know how the domain ended"
	}
}

// oomKilled reports whether, since the machine's start, the kernel has killed a process in the machine's cgroup for
// lack of memory.
func (in *instance) oomKilled() bool {
	kills, err := stats.OOMKills(in.def.Cgroup)
	return in.def.Cgroup != "" && err == nil && kills > in.run.OOMKills
}

// finish records and reports the end of a run, but only once. The channel ended identifies the run.
func (d *Driver) finish(in *instance, ended chan struct{}, cause machine.Cause, message string) {
	in.mu.Lock()
	if in.state.Phase != machine.Running || in.ended != ended {
		in.mu.Unlock()
		return
	}
	in.state = in.run.end(cause, message)
	in.run.Ended = &in.state
	err := errors.Join(fpKnown.Hit(d.ctx), in.run.save(in.def.StateDir), fpWritten.Hit(d.ctx))
	state, name, shares := in.state, in.def.Name, in.shares
	close(ended)
	in.ended, in.shares = nil, nil
	in.mu.Unlock()
	err = errors.Join(err, shares.End(d.ctx))
	if err != nil {
		d.log.Warn("recording a machine's end failed", "machine", name, "err", err)
	}
	d.mu.Lock()
	sink := d.sink
	d.mu.Unlock()
	sink(machine.Event{Name: name, State: state})
}

// end returns the final state of a run. libvirt does not report QEMU's exit status, so a failed run has ExitKilled.
func (r run) end(cause machine.Cause, message string) machine.State {
	s := machine.State{Phase: machine.Ended, StartedAt: r.StartedAt, FinishedAt: time.Now(), Cause: cause, ExitCode: machine.ExitKilled,
		Message: message}
	switch cause {
	case machine.CausePowerOff:
		s.ExitCode = 0
	case machine.CausePanic:
		s.ExitCode = machine.ExitPanic
	}
	return s
}

// watchShares ends a machine if one of its virtiofsd processes has ended and QEMU has not.
func (d *Driver) watchShares(in *instance, shares *virtiofsd.Servers, proc *process.Process, ended chan struct{}) {
	ctx, cancel := context.WithCancel(d.ctx)
	defer cancel()
	d.bg.Go(func() {
		select {
		case <-ended:
			cancel()
		case <-ctx.Done():
		}
	})
	lost := shares.Watch(ctx)
	if lost == "" || proc.WaitFor(shareLossGrace) {
		return
	}
	in.mu.Lock()
	ending := in.ended != ended || in.run.Killing || in.run.Panicked
	if !ending {
		in.run.Lost = lost
		if err := in.run.save(in.def.StateDir); err != nil {
			d.log.Warn("recording the loss of a share failed", "machine", in.def.Name, "err", err)
		}
	}
	domain := in.domain
	in.mu.Unlock()
	if ending {
		return // QEMU is about to end
	}
	d.log.Error("ending a machine that lost a share", "domain", domain.Name, "reason", lost)
	end, cancelEnd := context.WithTimeout(d.ctx, undoTimeout)
	defer cancelEnd()
	if _, err := d.destroyDomain(end, domain, proc); err != nil {
		d.log.Error("ending the machine failed", "domain", domain.Name, "err", err)
	}
	d.refresh(d.ctx, in)
}

// watch waits for the end of a run's process. If libvirtd is running, libvirtd also notices the end and can tell the
// reason.
func (d *Driver) watch(in *instance, proc *process.Process, ended chan struct{}) {
	shares := in.shares
	d.bg.Go(func() { d.watchShares(in, shares, proc, ended) })
	d.bg.Go(func() {
		select {
		case <-proc.Dead:
		case <-ended:
			return
		case <-d.ctx.Done():
			return
		}
		deadline, tick := time.NewTimer(noticeTimeout), time.NewTicker(noticeInterval)
		defer deadline.Stop()
		defer tick.Stop()
		for {
			d.refresh(d.ctx, in)
			select {
			case <-ended:
				return
			case <-d.ctx.Done():
				return
			case <-deadline.C:
				cause, message := in.causeOf(int32(golibvirt.DomainShutoffCrashed))
				d.finish(in, ended, cause, message)
				return
			case <-tick.C:
			}
		}
	})
}
