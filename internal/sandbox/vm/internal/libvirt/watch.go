package libvirt

import (
	"context"
	"errors"
	"fmt"
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
	// lookTimeout bounds a look at a domain; lookPause is from one that failed to the next.
	lookTimeout, lookPause = 10 * time.Second, 5 * time.Second
	// noticeTimeout is how long libvirtd may take to notice that a process of its own has ended.
	noticeTimeout = 5 * time.Second
	// noticeInterval is how often it is asked meanwhile; it tells by an event, too.
	noticeInterval = 200 * time.Millisecond

	// lostTime is how long QEMU may take to end after its virtiofsd, which ends as soon as QEMU lets go of it.
	lostTime = time.Second

	killedMessage = "killed"
)

// lookAtAll looks at every machine that runs, after a connection has been made: events may have been missed.
func (d *Driver) lookAtAll(ctx context.Context) {
	d.mu.Lock()
	var all []*instance
	for _, in := range d.machines {
		all = append(all, in)
	}
	d.mu.Unlock()
	for _, in := range all {
		d.look(ctx, in)
	}
}

// lookAtDomain looks at the machine of a domain to which something has happened.
func (d *Driver) lookAtDomain(domain string) {
	name, ours := strings.CutPrefix(domain, namePrefix)
	in, err := d.find(name)
	if !ours || err != nil {
		return
	}
	d.bg.Go(func() { d.look(d.ctx, in) })
}

// look asks libvirt how a machine that runs is, and ends its run when it does not any more.
func (d *Driver) look(ctx context.Context, in *instance) {
	in.mu.Lock()
	domain, over, ended := in.domain, in.state.Phase != machine.Running || in.launch != nil, in.ended
	in.mu.Unlock()
	if over {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	c, err := d.link.condition(ctx, domain)
	switch {
	case errdefs.IsNotFound(err):
		d.finish(in, ended, machine.CauseUnknown, "the domain is not in libvirt any more")
	case err != nil:
		d.lookAgain(in, err)
	case c.state == golibvirt.DomainCrashed:
		d.panicked(ctx, in, domain)
	case !c.active():
		cause, message := in.causeOf(c.reason)
		d.finish(in, ended, cause, message)
	}
}

// lookAgain queries a machine once more, later: a libvirtd that has just restarted may need time, and sends no events for what
// happened while it was down.
func (d *Driver) lookAgain(in *instance, why error) {
	in.mu.Lock()
	pending, domain := in.lookPending, in.domain.Name
	in.lookPending = true
	in.mu.Unlock()
	if pending {
		return
	}
	d.log.Warn("a machine could not be looked at", "domain", domain, "err", why)
	d.bg.Go(func() {
		select {
		case <-time.After(lookPause):
		case <-d.ctx.Done():
			return
		}
		in.mu.Lock()
		in.lookPending = false
		in.mu.Unlock()
		d.look(d.ctx, in)
	})
}

// panicked ends a machine whose guest has panicked; libvirt keeps it until then.
func (d *Driver) panicked(ctx context.Context, in *instance, domain golibvirt.Domain) {
	in.mu.Lock()
	in.run.Panicked = true
	err := in.run.save(in.def.StateDir)
	proc, ended := in.proc, in.ended
	in.mu.Unlock()
	if err != nil {
		d.log.Warn("a guest's panic could not be written down", "domain", domain.Name, "err", err)
	}
	if _, err := d.destroyDomain(ctx, domain, proc); err != nil {
		d.log.Warn("a machine whose guest has panicked could not be ended", "domain", domain.Name, "err", err)
		return
	}
	cause, message := in.causeOf(int32(golibvirt.DomainShutoffDestroyed))
	d.finish(in, ended, cause, message)
}

// causeOf says why a run ended, from libvirt's reason and what we know.
func (in *instance) causeOf(reason int32) (cause machine.Cause, message string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.run.Panicked {
		return machine.CausePanic, "the guest's kernel has panicked"
	}
	if in.run.Lost != "" && golibvirt.DomainShutoffReason(reason) != golibvirt.DomainShutoffShutdown {
		if in.oomKilled() {
			return machine.CauseOOM, "the pod's memory was used up: " + in.run.Lost
		}
		return machine.CauseFailed, in.run.Lost
	}
	switch golibvirt.DomainShutoffReason(reason) {
	case golibvirt.DomainShutoffShutdown:
		return machine.CausePowerOff, "the guest has turned itself off"
	case golibvirt.DomainShutoffDestroyed:
		if in.run.Killing {
			return machine.CauseKilled, killedMessage
		}
		return machine.CauseFailed, "the domain was destroyed by somebody else"
	case golibvirt.DomainShutoffCrashed, golibvirt.DomainShutoffFailed:
		if in.oomKilled() {
			return machine.CauseOOM, "QEMU was killed: the pod's memory was used up"
		}
		if in.run.Killing {
			return machine.CauseKilled, killedMessage
		}
		return machine.CauseFailed, "QEMU has ended by itself or by a signal; libvirt's log of the domain may say more"
	case golibvirt.DomainShutoffSaved, golibvirt.DomainShutoffMigrated, golibvirt.DomainShutoffFromSnapshot, golibvirt.DomainShutoffDaemon:
		return machine.CauseFailed, fmt.Sprintf("the domain was ended by somebody else (libvirt's reason %d)", reason)
	default:
		return machine.CauseUnknown, "libvirt does not know how the domain ended"
	}
}

// oomKilled tells whether something in the machine's cgroup was killed for want of memory since it was started.
func (in *instance) oomKilled() bool {
	kills, err := stats.OOMKills(in.def.Cgroup)
	return in.def.Cgroup != "" && err == nil && kills > in.run.OOMKills
}

// finish ends the run that ended stands for, once: it is written down and told.
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
		d.log.Warn("the end of a machine could not be written down", "machine", name, "err", err)
	}
	d.mu.Lock()
	sink := d.sink
	d.mu.Unlock()
	sink(machine.Event{Name: name, State: state})
}

// end is the state at the end of a run. libvirt does not tell how QEMU exited, so one that failed counts as killed.
func (r run) end(cause machine.Cause, message string) machine.State {
	s := machine.State{Phase: machine.Ended, StartedAt: r.StartedAt, FinishedAt: time.Now(), Cause: cause, ExitCode: machine.ExitKilled, Message: message}
	switch cause {
	case machine.CausePowerOff:
		s.ExitCode = 0
	case machine.CausePanic:
		s.ExitCode = machine.ExitPanic
	}
	return s
}

// watchShares ends a machine of which a virtiofsd has ended while QEMU goes on. QEMU's own end ends it too, so that is given
// the time to be seen.
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
	if lost == "" || proc.WaitFor(lostTime) {
		return
	}
	in.mu.Lock()
	over := in.ended != ended || in.run.Killing || in.run.Panicked
	if !over {
		in.run.Lost = lost
		if err := in.run.save(in.def.StateDir); err != nil {
			d.log.Warn("that a machine has lost a share could not be written down", "machine", in.def.Name, "err", err)
		}
	}
	domain := in.domain
	in.mu.Unlock()
	if over {
		return // it is about to end
	}
	d.log.Error("a machine has lost a share; ending it", "domain", domain.Name, "reason", lost)
	end, cancelEnd := context.WithTimeout(d.ctx, undoTimeout)
	defer cancelEnd()
	if _, err := d.destroyDomain(end, domain, proc); err != nil {
		d.log.Error("end a machine that has lost a share", "domain", domain.Name, "err", err)
	}
	d.look(d.ctx, in)
}

// watch waits for the end of a run's process. libvirtd notices it as well and says why, unless it is not there.
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
			d.look(d.ctx, in)
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
