package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// Recover implements machine.Driver.
func (d *Driver) Recover(ctx context.Context, names []string, sink func(machine.Event)) (map[string]machine.State, error) {
	entries, err := os.ReadDir(d.cfg.Root)
	if err != nil {
		return nil, fmt.Errorf("the directory of the machines: %w", err)
	}
	named := map[string]bool{}
	for _, name := range names {
		named[name] = true
	}
	var all sync.WaitGroup
	for _, e := range entries {
		if !e.IsDir() || !nameForm.MatchString(e.Name()) {
			continue
		}
		// Each may have to be waited for.
		all.Go(func() {
			if err := d.takeOverOrRemove(ctx, e.Name(), named[e.Name()]); err != nil {
				d.log.Error("take over a machine", "machine", e.Name(), "err", err)
			}
		})
	}
	all.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if d.cfg.Accel == AccelAuto { // so that the first start need not wait for it
		d.bg.Go(func() { _, _ = d.Probe(d.ctx) })
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// What ends from here on is an event; what ended before is in the answer.
	d.sink = sink
	found := map[string]machine.State{}
	for name, h := range d.machines {
		if named[name] {
			found[name] = h.state()
		}
	}
	return found, nil
}

// takeOverOrRemove takes over the machine of a directory, or removes it.
func (d *Driver) takeOverOrRemove(ctx context.Context, name string, wanted bool) error {
	var def definition
	err := readJSON(filepath.Join(d.dirOf(name), definitionFile), &def)
	if err == nil && def.Name != name {
		err = fmt.Errorf("machine.json is of machine %.64q: %w", def.Name, errdefs.ErrDataLoss)
	}
	h := newHandle(d, machine.Definition{Name: name})
	h.def = def.Definition
	h.def.Name = name
	if stateErr := readJSON(filepath.Join(h.dir, stateFile), &h.rec); stateErr != nil && !notThere(stateErr) {
		h.rec = record{Version: recordVersion}
		err = errors.Join(err, stateErr)
	}
	if err != nil && !notThere(err) {
		d.log.Error("the record of a machine cannot be used", "machine", name, "err", err)
	}
	if !wanted || err != nil {
		d.log.Info("removing a machine that is not in the record, or half made", "machine", name)
		return h.removeLeft(ctx)
	}
	if err := h.recover(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines[name] = h
	return nil
}

// removeLeft kills and removes what nobody wants.
func (h *handle) removeLeft(ctx context.Context) error {
	if p, err := process.Adopt(h.rec.Process); err == nil {
		if h.rec.Boot == bootID() {
			err = errors.Join(p.Signal(killSignal), p.Wait(ctx))
		}
		p.Close()
		if err != nil {
			return err
		}
	}
	if err := errors.Join(h.killLeft(ctx, h.def), h.endShares(ctx)); err != nil {
		return err
	}
	return h.remove(ctx)
}

// endShares ends the virtiofsd that were written down of a machine whose QEMU has ended.
func (h *handle) endShares(ctx context.Context) error {
	if h.rec.Boot != bootID() {
		return nil
	}
	servers, err := virtiofsd.Adopt(h.shareOptions(h.def), h.def.Shares, h.rec.Shares)
	if err != nil {
		return err
	}
	return servers.End(ctx)
}

// recover finds out what became of a machine while nobody looked.
func (h *handle) recover(ctx context.Context) error {
	switch h.rec.Step {
	case stepStarting, stepRunning:
	case stepDefined, stepEnded:
		return h.killLeft(ctx, h.def)
	}
	p, err := process.Adopt(h.rec.Process)
	if h.rec.Step == stepStarting && h.rec.Process.Pid == 0 {
		if p = h.findMarked(h.def); p == nil { // the start came to nothing
			return h.set(func(rec *record) { *rec = record{Version: recordVersion} })
		}
		err = nil
	}
	if _, statErr := os.Stat(h.def.Dir); h.rec.Boot != bootID() || notThere(statErr) {
		if p != nil && h.rec.Boot == bootID() { // its directory was taken away under it
			err = errors.Join(p.Signal(killSignal), p.Wait(ctx))
		} else {
			err = nil
		}
		p.Close()
		return errors.Join(err, h.killLeft(ctx, h.def), h.endShares(ctx), h.set(func(rec *record) {
			rec.Step, rec.FinishedAt, rec.Cause, rec.ExitCode, rec.Message = stepEnded, time.Now(), machine.CauseUnknown, machine.ExitKilled, "the node was restarted"
		}))
	}
	if errdefs.IsNotFound(err) {
		if err := h.endShares(ctx); err != nil {
			return err
		}
		return h.set(func(rec *record) { *rec = verdict(*rec, nil, oomKilled(h.def, *rec), logPath(h.def)) })
	}
	if err != nil {
		return err
	}
	return h.takeOver(ctx, p)
}

// takeOver watches a QEMU that was found again. A guest that ended while nobody looked is given the time to be seen.
func (h *handle) takeOver(ctx context.Context, p *process.Process) error {
	r, killing := adopted(h, p), h.rec.Killing
	h.run = r
	var err error
	if r.shares, err = virtiofsd.Adopt(h.shareOptions(h.def), h.def.Shares, h.rec.Shares); err != nil {
		h.log.Error("a machine's virtiofsd cannot be watched", "pid", p.Pid, "err", err)
	}
	err = h.set(func(rec *record) {
		rec.Process = p.ID
		if rec.Step == stepStarting {
			rec.Step, rec.StartedAt = stepRunning, process.StartedAt(p.Start)
		}
	})
	if killing { // somebody was about to
		err = errors.Join(err, p.Signal(killSignal))
	}
	asking, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	ended := false
	if connErr := r.connect(asking); connErr == nil {
		if m := r.client(); h.askStatus(r, m) != "" {
			ended = true
		}
	} else {
		h.log.Warn("a machine's monitor does not answer", "pid", p.Pid, "err", connErr)
	}
	h.log.Info("found a machine again", "pid", p.Pid)
	h.d.bg.Go(func() { h.watch(r) })
	if ended || killing {
		select {
		case <-r.over:
		case <-ctx.Done():
		case <-time.After(endTime):
		}
	}
	return err
}
