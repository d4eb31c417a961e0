package libvirt

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

const (
	// buttonTimeout bounds the call that presses the power button, because libvirt does not answer while QEMU hangs.
	buttonTimeout = 5 * time.Second
	// sigtermTimeout bounds the time that QEMU may take, after libvirt's SIGTERM, to flush its disks and end.
	sigtermTimeout = 2 * time.Second
)

// Shutdown implements machine.Driver. It has no effect on a machine that has ended.
func (d *Driver) Shutdown(ctx context.Context, name string) error {
	in, err := d.find(name)
	if err != nil {
		return err
	}
	in.mu.Lock()
	domain, phase := in.domain, in.state.Phase
	in.mu.Unlock()
	switch phase {
	case machine.Defined:
		return fmt.Errorf("machine %s was never started: %w", name, errdefs.ErrFailedPrecondition)
	case machine.Ended:
		return nil
	case machine.Running:
	}
	ctx, cancel := context.WithTimeout(ctx, buttonTimeout)
	defer cancel()
	err = d.link.do(ctx, "shut down domain "+domain.Name, func(c *golibvirt.Libvirt) error {
		return c.DomainShutdownFlags(domain, golibvirt.DomainShutdownAcpiPowerBtn)
	})
	if errdefs.IsFailedPrecondition(err) {
		if c, stateErr := d.link.domainStatus(ctx, domain); stateErr == nil && !c.active() {
			return nil // the machine has just ended
		}
	}
	return err
}

// Destroy implements machine.Driver. It also works without libvirtd.
func (d *Driver) Destroy(ctx context.Context, name string) error {
	in, err := d.find(name)
	if err != nil {
		return err
	}
	in.mu.Lock()
	domain, proc, ended, starting := in.domain, in.proc, in.ended, in.launch != nil
	runs := in.state.Phase == machine.Running
	if runs && !in.run.Killing {
		in.run.Killing = true
		if err := in.run.save(in.def.StateDir); err != nil {
			d.log.Warn("recording the kill of a machine failed", "machine", name, "err", err)
		}
	}
	in.mu.Unlock()
	if !runs && !starting {
		return nil
	}
	if err := fpKilling.Hit(ctx); err != nil {
		return err
	}
	forced, err := d.destroyDomain(ctx, domain, proc)
	if err == nil {
		err = fpKilled.Hit(ctx)
	}
	if err != nil {
		return err
	}
	if starting && !runs {
		return nil // Start returns the error
	}
	if !forced {
		d.refresh(ctx, in) // prefer libvirt's reason, because the guest may have powered off just before
	}
	cause, message := in.causeOf(int32(golibvirt.DomainShutoffDestroyed))
	d.finish(in, ended, cause, message)
	return nil
}

// killing reports whether the daemon has decided to kill the machine.
func (in *instance) killing() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.run.Killing
}

// destroyDomain destroys a domain and waits until its process has ended. If libvirt does not end the process in time,
// destroyDomain sends SIGKILL and returns forced = true.
func (d *Driver) destroyDomain(ctx context.Context, domain golibvirt.Domain, proc *process.Process) (forced bool, err error) {
	if proc != nil && proc.Pid == 0 {
		proc = nil // only libvirt knows the process
	}
	destroyed := make(chan error, 1)
	go func() { destroyed <- d.link.destroy(ctx, domain) }()
	grace := time.NewTimer(sigtermTimeout)
	defer grace.Stop()
	select {
	case err = <-destroyed:
		if err == nil && (proc == nil || proc.WaitFor(sigtermTimeout)) {
			return false, nil
		}
	case <-grace.C:
		if proc == nil {
			return false, <-destroyed
		}
	}
	if proc == nil {
		return false, err
	}
	if err := proc.Signal(unix.SIGKILL); err != nil {
		return true, fmt.Errorf("kill process %d of domain %s: %w", proc.Pid, domain.Name, err)
	}
	return true, proc.Wait(ctx)
}
