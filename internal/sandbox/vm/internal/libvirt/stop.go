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
	// buttonTimeout bounds the pressing of the power button; a QEMU that hangs does not answer libvirt.
	buttonTimeout = 5 * time.Second
	// kindTimeout is how long libvirt's SIGTERM, on which QEMU writes out what its disks have not, may take to work.
	kindTimeout = 2 * time.Second
)

// Shutdown implements machine.Driver. A machine that has ended is left as it is.
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
	err = d.link.order(ctx, "shut domain "+domain.Name+" down", func(c *golibvirt.Libvirt) error {
		return c.DomainShutdownFlags(domain, golibvirt.DomainShutdownAcpiPowerBtn)
	})
	if errdefs.IsFailedPrecondition(err) {
		if c, stateErr := d.link.condition(ctx, domain); stateErr == nil && !c.active() {
			return nil // it has ended meanwhile
		}
	}
	return err
}

// Destroy implements machine.Driver. It works without libvirtd, too.
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
			d.log.Warn("That a machine is killed could not be written down", "machine", name, "err", err)
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
		return nil // Start ends it with its own error
	}
	if !forced {
		d.look(ctx, in) // libvirt's word first: the guest may have powered off just before
	}
	cause, message := in.causeOf(int32(golibvirt.DomainShutoffDestroyed))
	d.finish(in, ended, cause, message)
	return nil
}

// killing tells whether it was decided to kill the machine.
func (in *instance) killing() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.run.Killing
}

// destroyDomain returns when the domain's process is dead: by libvirt, or, when that does not help in time, forced by
// SIGKILL.
func (d *Driver) destroyDomain(ctx context.Context, domain golibvirt.Domain, proc *process.Process) (forced bool, err error) {
	if proc != nil && proc.Pid == 0 {
		proc = nil // libvirt alone knows it
	}
	destroyed := make(chan error, 1)
	go func() { destroyed <- d.link.destroy(ctx, domain) }()
	kind := time.NewTimer(kindTimeout)
	defer kind.Stop()
	select {
	case err = <-destroyed:
		if err == nil && (proc == nil || proc.WaitFor(kindTimeout)) {
			return false, nil
		}
	case <-kind.C:
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
