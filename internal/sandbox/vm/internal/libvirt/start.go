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
	// startTimeout bounds a start. On an idle host, a start takes 0.3–0.5 s, and 5 s more when libvirt probes QEMU.
	startTimeout = 2 * time.Minute
	// undoTimeout bounds the cleanup after a failed start.
	undoTimeout = 30 * time.Second
)

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
		return errors.Join(err, in.recordStartFailure(ctx, err))
	}
	d.refresh(ctx, in) // the machine may have ended already
	return nil
}

// run starts the domain and waits until libvirt reports that the domain runs.
func (d *Driver) run(ctx context.Context, in *instance, def machine.Definition) error {
	l, err := d.newLaunch(ctx, def)
	if err != nil {
		return err
	}
	if err := fpOpened.Hit(ctx); err != nil {
		l.close()
		return err
	}
	// Define the domain again: the secret is only for this start, and the emulator's path may have changed, because the
	// node was rebooted or QEMU was updated.
	domain, err := d.defineDomain(ctx, def, l.secret)
	if err == nil {
		err = fpReady.Hit(ctx)
	}
	if err != nil {
		l.close()
		return err
	}
	in.beginStart(domain, l)
	defer in.endStart()
	_, err = ask(ctx, d.link, "start domain "+domain.Name, func(c *golibvirt.Libvirt) (golibvirt.Domain, error) {
		return c.DomainCreateWithFlags(domain, 0)
	})
	if err == nil {
		err = fpCreated.Hit(ctx)
	}
	if err == nil && !in.granted() {
		err = fmt.Errorf("domain %s is running, but its emulator did not request the machine's descriptors: %w", domain.Name,
			errdefs.ErrFailedPrecondition)
	}
	if err == nil {
		err = in.recordRunning(d)
	}
	if err != nil {
		d.undo(ctx, in, domain)
		return err
	}
	return nil
}

// undo ends a domain whose start failed. It does so even if ctx has been canceled or has expired.
func (d *Driver) undo(ctx context.Context, in *instance, domain golibvirt.Domain) {
	in.endStart() // from now on, the tap service refuses the wrapper
	in.mu.Lock()
	proc, limit := in.proc, undoTimeout
	in.mu.Unlock()
	if proc == nil {
		limit = sigtermTimeout
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	if _, err := d.destroyDomain(ctx, domain, proc); err != nil {
		d.log.Warn("ending a domain after a failed start failed", "domain", domain.Name, "err", err)
	}
}

// beginStart records that a start is in progress. From then on, the tap service answers the wrapper.
func (in *instance) beginStart(domain golibvirt.Domain, l *launch) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.proc.Close()
	in.domain, in.launch, in.proc, in.shares, in.run = domain, l, nil, nil, run{}
	in.ended = make(chan struct{})
}

// endStart records that the start is over. From then on, the tap service refuses the wrapper.
func (in *instance) endStart() {
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

// recordRunning records that the machine runs. If libvirt has put the process or some threads into another cgroup,
// recordRunning moves them back.
func (in *instance) recordRunning(d *Driver) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.def.Cgroup != "" && in.proc.Alive() && !d.inCgroup(in.proc.Pid, in.def.Cgroup) {
		if err := d.joinCgroup(in.def.Cgroup, in.proc.Pid); err != nil {
			return err
		}
	}
	in.state = machine.State{Phase: machine.Running, Pid: in.proc.Pid, StartedAt: in.run.StartedAt}
	d.watch(in, in.proc, in.ended)
	return nil
}

// recordStartFailure records that the start failed, and ends the virtiofsd processes.
func (in *instance) recordStartFailure(ctx context.Context, err error) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	now := time.Now()
	in.state = machine.State{Phase: machine.Ended, StartedAt: now, FinishedAt: now, Cause: machine.CauseStart, ExitCode: machine.ExitKilled,
		Message: err.Error()}
	if in.ended != nil {
		close(in.ended)
		in.ended = nil
	}
	in.run.Boot, in.run.StartedAt, in.run.Ended = machine.BootID(), now, &in.state
	_ = in.run.save(in.def.StateDir) // the caller records the end too
	shares := in.shares
	in.shares = nil
	return shares.End(ctx)
}
