package libvirt

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

const (
	// startTimeout bounds a start. It takes 0.3–0.5 s on a quiet machine, and 5 s more when libvirt asks QEMU what it can do.
	startTimeout = 2 * time.Minute
	// undoTimeout bounds what is done after a start that was given up.
	undoTimeout = 30 * time.Second
)

// Start implements machine.Driver.
func (d *Driver) Start(ctx context.Context, name string) error {
	in, err := d.find(name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	in.mu.Lock()
	def, runs, starting := in.def, in.state.Phase == machine.Running, in.launch != nil
	in.mu.Unlock()
	if runs {
		return nil
	}
	if starting {
		return fmt.Errorf("machine %s is being started: %w", name, errdefs.ErrFailedPrecondition)
	}
	if err := d.run(ctx, in, def); err != nil {
		return errors.Join(err, in.fail(ctx, err))
	}
	d.look(ctx, in) // it may have ended by now
	return nil
}

// run starts the domain and waits until libvirt says that it runs.
func (d *Driver) run(ctx context.Context, in *instance, def machine.Definition) error {
	l, err := d.newLaunch(ctx, def)
	if err != nil {
		return err
	}
	if err := fpOpened.Hit(ctx); err != nil {
		l.close()
		return err
	}
	// The domain is defined again: its secret is for this start only, and after a reboot of the node, or with another QEMU, the
	// emulator has another name.
	domain, err := d.defineDomain(ctx, def, l.secret)
	if err == nil {
		err = fpReady.Hit(ctx)
	}
	if err != nil {
		l.close()
		return err
	}
	in.begin(domain, l)
	defer in.launched()
	_, err = ask(ctx, d.link, "start domain "+domain.Name, func(c *golibvirt.Libvirt) (golibvirt.Domain, error) {
		return c.DomainCreateWithFlags(domain, 0)
	})
	if err == nil {
		err = fpCreated.Hit(ctx)
	}
	if err == nil && !in.granted() {
		err = fmt.Errorf("domain %s runs, but its emulator has not asked for the machine's descriptors: %w", domain.Name, errdefs.ErrFailedPrecondition)
	}
	if err == nil {
		err = in.running(d)
	}
	if err != nil {
		d.undo(ctx, in, domain)
		return err
	}
	return nil
}

// undo ends what is left of a start that failed or was given up, whatever has become of ctx.
func (d *Driver) undo(ctx context.Context, in *instance, domain golibvirt.Domain) {
	in.launched() // from now on nobody gets the machine's files: a domain that has not got them ends by itself
	in.mu.Lock()
	proc, limit := in.proc, undoTimeout
	in.mu.Unlock()
	if proc == nil {
		limit = kindTimeout
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	if _, err := d.destroyDomain(ctx, domain, proc); err != nil {
		d.log.Warn("a domain that was not started could not be ended", "domain", domain.Name, "err", err)
	}
}

// begin notes that a start is under way: the tap service answers.
func (in *instance) begin(domain golibvirt.Domain, l *launch) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.proc.Close()
	in.domain, in.launch, in.proc, in.shares, in.run = domain, l, nil, nil, run{}
	in.ended = make(chan struct{})
}

// launched ends the start: nobody gets anything from the tap service any more.
func (in *instance) launched() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.launch != nil {
		in.launch.close()
		in.launch = nil
	}
}

func (in *instance) granted() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.launch.granted && in.proc != nil
}

// running notes that the machine runs. On a host whose libvirt has put it, or some of its threads,
// into a cgroup of its own, it is moved back.
func (in *instance) running(d *Driver) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.def.Cgroup != "" && in.proc.Alive() && !d.inCgroup(in.proc.Pid, in.def.Cgroup) {
		if err := d.join(in.def.Cgroup, in.proc.Pid); err != nil {
			return err
		}
	}
	in.state = machine.State{Phase: machine.Running, Pid: in.proc.Pid, StartedAt: in.run.StartedAt}
	d.watch(in, in.proc, in.ended)
	return nil
}

// fail notes that the machine could not be started, and ends what was to serve it.
func (in *instance) fail(ctx context.Context, err error) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	now := time.Now()
	in.state = machine.State{Phase: machine.Ended, StartedAt: now, FinishedAt: now, Cause: machine.CauseStart, ExitCode: machine.ExitKilled, Message: err.Error()}
	if in.ended != nil {
		close(in.ended)
		in.ended = nil
	}
	in.run.Boot, in.run.StartedAt, in.run.Ended = bootID(), now, &in.state
	_ = in.run.save(in.def.StateDir) // the caller gets the end, and records it too
	shares := in.shares
	in.shares = nil
	return shares.End(ctx)
}
