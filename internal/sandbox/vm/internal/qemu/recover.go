package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

func (d *Driver) Recover(ctx context.Context, names []string, sink func(machine.Event)) (map[string]machine.State, error) {
	entries, err := os.ReadDir(d.cfg.Root)
	if err != nil {
		return nil, fmt.Errorf("read the machines' directory: %w", err)
	}
	var all sync.WaitGroup
	for _, e := range entries {
		if !e.IsDir() || !nameForm().MatchString(e.Name()) {
			continue
		}
		all.Go(func() { // in parallel, because each machine can take time
			if err := d.recoverOrRemove(ctx, e.Name(), slices.Contains(names, e.Name())); err != nil {
				d.log.Error("recovering a machine failed", "machine", e.Name(), "err", err)
			}
		})
	}
	all.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if d.cfg.Accel == AccelAuto { // so that the first start need not wait for the probe
		d.bg.Go(func() { _, _ = d.Probe(d.ctx) })
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// From here on, exits are reported as events; earlier exits are in the returned map.
	d.sink = sink
	found := map[string]machine.State{}
	for name, h := range d.machines {
		if slices.Contains(names, name) {
			found[name] = h.state()
		}
	}
	return found, nil
}

// recoverOrRemove recovers a machine from its directory, or removes the machine if it is unwanted or its record is
// damaged.
func (d *Driver) recoverOrRemove(ctx context.Context, name string, wanted bool) error {
	var def definition
	err := readJSON(filepath.Join(d.dirOf(name), definitionFile), &def)
	if err == nil && def.Name != name {
		err = fmt.Errorf("machine.json belongs to machine %.64q: %w", def.Name, errdefs.ErrDataLoss)
	}
	h := newHandle(d, machine.Definition{Name: name})
	h.def = def.Definition
	h.def.Name = name
	if stateErr := readJSON(filepath.Join(h.dir, stateFile), &h.rec); stateErr != nil && !isNotExist(stateErr) {
		h.rec = record{Version: recordVersion}
		err = errors.Join(err, stateErr)
	}
	if err != nil && !isNotExist(err) {
		d.log.Error("a machine's record is unusable", "machine", name, "err", err)
	}
	if !wanted || err != nil {
		d.log.Info("removing an unknown or incomplete machine", "machine", name)
		return h.discard(ctx)
	}
	if err := h.recover(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines[name] = h
	return nil
}

// discard kills a machine's processes and removes its files.
func (h *handle) discard(ctx context.Context) error {
	if p, err := process.Adopt(h.rec.Process); err == nil {
		if h.rec.Boot == machine.BootID() {
			err = errors.Join(p.Signal(killSignal), p.Wait(ctx))
		}
		p.Close()
		if err != nil {
			return err
		}
	}
	if err := errors.Join(h.killLeftovers(ctx, h.def), h.endShares(ctx)); err != nil {
		return err
	}
	return h.remove(ctx)
}

// endShares ends the recorded virtiofsd processes of a machine whose QEMU has ended.
func (h *handle) endShares(ctx context.Context) error {
	if h.rec.Boot != machine.BootID() {
		return nil
	}
	servers, err := virtiofsd.Adopt(h.shareOptions(h.def), h.def.Shares, h.rec.Shares)
	if err != nil {
		return err
	}
	return servers.End(ctx)
}

// recover determines what happened to a machine since the last daemon ended, and watches it again if it is still
// running.
func (h *handle) recover(ctx context.Context) error {
	switch h.rec.Step {
	case stepStarting, stepRunning:
	case stepDefined, stepEnded:
		return h.killLeftovers(ctx, h.def)
	}
	p, err := process.Adopt(h.rec.Process)
	if h.rec.Step == stepStarting && h.rec.Process.Pid == 0 {
		if p = h.findByCommand(h.def); p == nil { // QEMU was never started
			return h.set(func(rec *record) { *rec = record{Version: recordVersion} })
		}
		err = nil
	}
	if _, statErr := os.Stat(h.def.Dir); h.rec.Boot != machine.BootID() || isNotExist(statErr) {
		if p != nil && h.rec.Boot == machine.BootID() { // the machine's directory was removed while QEMU ran
			err = errors.Join(p.Signal(killSignal), p.Wait(ctx))
		} else {
			err = nil
		}
		p.Close()
		return errors.Join(err, h.killLeftovers(ctx, h.def), h.endShares(ctx), h.set(func(rec *record) {
			rec.Step, rec.FinishedAt, rec.Cause, rec.ExitCode, rec.Message = stepEnded, time.Now(), machine.CauseUnknown, machine.ExitKilled,
				"the node was restarted"
		}))
	}
	if errdefs.IsNotFound(err) {
		if err := h.endShares(ctx); err != nil {
			return err
		}
		return h.set(func(rec *record) { *rec = endedRecord(*rec, nil, oomKilled(h.def, *rec), logPath(h.def)) })
	}
	if err != nil {
		return err
	}
	return h.takeOver(ctx, p)
}

// takeOver watches a QEMU that an earlier daemon started. If its guest has ended, takeOver waits for the final record.
func (h *handle) takeOver(ctx context.Context, p *process.Process) error {
	r, killing := newAdoptedRun(h, p), h.rec.Killing
	h.run = r
	var err error
	if r.shares, err = virtiofsd.Adopt(h.shareOptions(h.def), h.def.Shares, h.rec.Shares); err != nil {
		h.log.Error("watching a machine's virtiofsd failed", "pid", p.Pid, "err", err)
	}
	err = h.set(func(rec *record) {
		rec.Process = p.ID
		if rec.Step == stepStarting {
			rec.Step, rec.StartedAt = stepRunning, process.StartedAt(p.Start)
		}
	})
	if killing { // the earlier daemon had decided to kill the machine
		err = errors.Join(err, p.Signal(killSignal))
	}
	asking, cancel := context.WithTimeout(ctx, monitorTimeout)
	defer cancel()
	ended := false
	if connErr := r.connect(asking); connErr == nil {
		if m := r.client(); h.askStatus(r, m) != "" {
			ended = true
		}
	} else {
		h.log.Warn("a machine's monitor does not answer", "pid", p.Pid, "err", connErr)
	}
	h.log.Info("machine recovered", "pid", p.Pid)
	h.d.bg.Go(func() { h.watch(r) })
	if ended || killing {
		select {
		case <-r.recorded:
		case <-ctx.Done():
		case <-time.After(killTimeout):
		}
	}
	return err
}
