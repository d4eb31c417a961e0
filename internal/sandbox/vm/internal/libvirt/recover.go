package libvirt

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// Recover implements machine.Driver. If libvirtd cannot be reached, Recover returns errdefs.ErrUnavailable and can be
// called again.
func (d *Driver) Recover(ctx context.Context, names []string, sink func(machine.Event)) (map[string]machine.State, error) {
	d.mu.Lock()
	d.sink = sink
	d.mu.Unlock()
	if err := d.awaitLink(ctx); err != nil {
		return nil, err
	}
	domains, err := ask(ctx, d.link, "list domains", func(c *golibvirt.Libvirt) ([]golibvirt.Domain, error) {
		list, _, err := c.ConnectListAllDomains(1, golibvirt.ConnectListDomainsActive|golibvirt.ConnectListDomainsInactive)
		return list, err
	})
	if err != nil {
		return nil, err
	}
	found := map[string]machine.State{}
	for _, domain := range domains {
		name, ours := strings.CutPrefix(domain.Name, namePrefix)
		if !ours {
			continue
		}
		def, err := d.definition(ctx, domain)
		if errdefs.IsNotFound(err) {
			continue // the domain belongs to another daemon, or was just removed
		}
		if err == nil && slices.Contains(names, name) {
			found[name], err = d.recoverMachine(ctx, domain, def)
		} else if err == nil {
			err = d.remove(ctx, domain, def)
		}
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

// awaitLink waits for libvirtd, but only briefly, because the wait delays the start of the node.
func (d *Driver) awaitLink(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	_, err := d.link.awaitClient(ctx)
	return err
}

// definition returns the definition in a domain's mark, or errdefs.ErrNotFound if the domain has no mark of this
// daemon.
func (d *Driver) definition(ctx context.Context, domain golibvirt.Domain) (machine.Definition, error) {
	text, err := ask(ctx, d.link, "read the mark of domain "+domain.Name, func(c *golibvirt.Libvirt) (string, error) {
		text, err := c.DomainGetMetadata(domain, int32(golibvirt.DomainMetadataElement), golibvirt.OptString{metadataURI},
			golibvirt.DomainAffectCurrent)
		libvirtErr, ok := err.(golibvirt.Error) //nolint:errorlint // go-libvirt returns it bare
		if ok && libvirtErr.Code == uint32(golibvirt.ErrNoDomainMetadata) {
			return "", golibvirt.Error{Code: uint32(golibvirt.ErrNoDomain), Message: libvirtErr.Message}
		}
		return text, err
	})
	if err != nil {
		return machine.Definition{}, err
	}
	var mark metadata
	if err := xml.Unmarshal([]byte(text), &mark); err != nil || mark.Owner != d.cfg.Owner {
		return machine.Definition{}, fmt.Errorf("domain %s does not belong to %s: %w", domain.Name, d.cfg.Owner, errdefs.ErrNotFound)
	}
	var def machine.Definition
	if err := json.Unmarshal([]byte(mark.Definition), &def); err != nil {
		return machine.Definition{}, fmt.Errorf("decode the definition in domain %s: %w: %w", domain.Name, err, errdefs.ErrDataLoss)
	}
	return def, nil
}

// recoverMachine takes over a machine from an earlier daemon, unless an earlier, interrupted call of Recover has
// already done so.
func (d *Driver) recoverMachine(ctx context.Context, domain golibvirt.Domain, def machine.Definition) (machine.State, error) {
	if state, err := d.State(ctx, def.Name); err == nil {
		return state, nil
	}
	record, err := loadRun(def.StateDir)
	if err != nil {
		d.log.Warn("the record of a machine's run is lost", "machine", def.Name, "err", err)
	}
	c, err := d.link.domainStatus(ctx, domain)
	if err != nil {
		return machine.State{}, err
	}
	if c.active() && record.processEnded() {
		if c, err = d.awaitInactive(ctx, domain); err != nil {
			return machine.State{}, err
		}
	}
	in := &instance{def: def, domain: domain, run: record, state: machine.State{Phase: machine.Defined}}
	switch {
	case c.active():
		if in.run.Ended != nil || in.run.Process.Pid == 0 { // the daemon died before it recorded the start
			in.run = run{Boot: machine.BootID(), StartedAt: time.Now()}
		}
		in.ended = make(chan struct{})
		in.proc = in.findProcess(d.cfg.Cgroup)
		if in.shares, err = virtiofsd.Adopt(d.shareOptions(def), def.Shares, in.run.Shares); err != nil {
			return machine.State{}, err
		}
		in.state = machine.State{Phase: machine.Running, Pid: in.proc.Pid, StartedAt: in.run.StartedAt}
	case in.run.Ended != nil:
		in.state = *in.run.Ended
	case !in.run.StartedAt.IsZero():
		if err := d.endShares(ctx, def, in.run); err != nil {
			return machine.State{}, err
		}
		cause, message := in.causeOf(c.reason)
		if _, err := os.Stat(def.Dir); in.run.Boot != machine.BootID() || errors.Is(err, fs.ErrNotExist) {
			cause, message = machine.CauseUnknown, "the node was restarted"
		}
		in.state = in.run.end(cause, message)
		in.run.Ended = &in.state
		if err := in.run.save(def.StateDir); err != nil {
			return machine.State{}, err
		}
	}
	d.mu.Lock()
	d.machines[def.Name] = in
	d.mu.Unlock()
	if state := in.state; state.Phase != machine.Running {
		return state, nil
	}
	if in.proc.Pid != 0 {
		d.watch(in, in.proc, in.ended)
	}
	d.refresh(ctx, in) // the guest may have panicked in the meantime
	if in.killing() {
		if err := d.Destroy(ctx, def.Name); err != nil { // the earlier daemon had begun to kill the machine
			return machine.State{}, err
		}
	}
	return d.State(ctx, def.Name)
}

// awaitInactive waits until libvirtd has noticed the end of a domain's process. After noticeTimeout it destroys the
// domain.
func (d *Driver) awaitInactive(ctx context.Context, domain golibvirt.Domain) (domainStatus, error) {
	deadline, tick := time.NewTimer(noticeTimeout), time.NewTicker(noticeInterval/10)
	defer deadline.Stop()
	defer tick.Stop()
	for {
		c, err := d.link.domainStatus(ctx, domain)
		if err != nil || !c.active() {
			return c, err
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			if err := d.link.destroy(ctx, domain); err != nil {
				return c, err
			}
		case <-ctx.Done():
			return c, fmt.Errorf("domain %s has ended, but libvirtd has not noticed: %w: %w", domain.Name, context.Cause(ctx),
				errdefs.ErrUnavailable)
		}
	}
}

// findProcess returns the QEMU of a run: the recorded process, or the one in the cgroup. If there is neither,
// findProcess returns a process with PID 0 that counts as ended. The driver then learns of the machine's end only from
// libvirt.
func (in *instance) findProcess(tree cgroup.Tree) *process.Process {
	if proc, err := in.run.adopt(); err == nil {
		return proc
	}
	if in.def.Cgroup != "" {
		for _, dir := range tree.Dirs(in.def.Cgroup) {
			for _, pid := range cgroup.Procs(dir) {
				if !qemu.IsMachine(pid, in.def.Name) {
					continue
				}
				if proc, err := process.Open(pid); err == nil {
					in.run.Process, in.run.Boot, in.run.StartedAt = proc.ID, machine.BootID(), process.StartedAt(proc.Start)
					return proc
				}
			}
		}
	}
	return process.Ended(process.ID{})
}

// remove ends and removes a machine that Recover's caller did not name.
func (d *Driver) remove(ctx context.Context, domain golibvirt.Domain, def machine.Definition) error {
	d.log.Info("removing an unknown machine", "machine", def.Name)
	record, _ := loadRun(def.StateDir)
	proc, err := record.adopt()
	if err != nil {
		proc = nil // libvirt ends the process
	}
	defer proc.Close()
	if _, err := d.destroyDomain(ctx, domain, proc); err != nil {
		return err
	}
	if err := d.endShares(ctx, def, record); err != nil {
		return err
	}
	return d.removeMachine(ctx, domain, def)
}

// endShares ends the virtiofsd processes of a run whose QEMU has ended.
func (d *Driver) endShares(ctx context.Context, def machine.Definition, r run) error {
	if r.Boot != machine.BootID() {
		return nil
	}
	shares, err := virtiofsd.Adopt(d.shareOptions(def), def.Shares, r.Shares)
	if err != nil {
		return err
	}
	return shares.End(ctx)
}
