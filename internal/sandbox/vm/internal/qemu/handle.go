package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

var (
	fpDefined   = failpoint.New("qemu.define.dir")
	fpUndefined = failpoint.New("qemu.undefine.removing")
)

// handle is one machine.
type handle struct {
	d    *Driver
	name string
	dir  string // Root/NAME
	log  *slog.Logger

	op sync.Mutex // held by Define, Start and Undefine; Destroy may run beside them

	mu  sync.Mutex
	def machine.Definition
	rec record
	run *run // nil without a process
}

func newHandle(d *Driver, def machine.Definition) *handle {
	return &handle{
		d: d, name: def.Name, dir: d.dirOf(def.Name), log: d.log.With("machine", def.Name),
		def: def, rec: record{Version: recordVersion},
	}
}

func (h *handle) state() machine.State {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rec.state()
}

func (h *handle) snapshot() (machine.Definition, record, *run) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.def, h.rec, h.run
}

// set changes the record in memory and on disk. If the write fails, the change stays in memory.
func (h *handle) set(change func(r *record)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.rec)
	if err := writeJSON(filepath.Join(h.dir, stateFile), h.rec, false); err != nil {
		return fmt.Errorf("write the machine's state: %w", err)
	}
	return nil
}

// mustSet is like set, but only logs a failed write. It is for events that have already happened.
func (h *handle) mustSet(change func(r *record)) {
	if err := h.set(change); err != nil {
		h.log.Error("writing a machine's record failed; it is out of date", "err", err)
	}
}

func (h *handle) define(ctx context.Context, def machine.Definition) error {
	h.op.Lock()
	defer h.op.Unlock()
	path := filepath.Join(h.dir, definitionFile)
	var have definition
	if err := readJSON(path, &have); err == nil && sameDefinition(have.Definition, def) {
		return nil
	}
	if h.state().Phase == machine.Running {
		return fmt.Errorf("replace the definition of machine %.64s: it is running: %w", h.name, errdefs.ErrFailedPrecondition)
	}
	if err := os.MkdirAll(h.dir, 0o700); err != nil {
		return fmt.Errorf("define machine: %w", err)
	}
	if err := fpDefined.Hit(ctx); err != nil {
		return err
	}
	if err := writeJSON(path, definition{recordVersion, def}, true); err != nil {
		return fmt.Errorf("define machine: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.def = def
	return nil
}

// sameDefinition compares definitions by their JSON form.
func sameDefinition(a, b machine.Definition) bool {
	one, errA := json.Marshal(a)
	other, errB := json.Marshal(b)
	return errA == nil && errB == nil && bytes.Equal(one, other)
}

// remove deletes the files of a machine that is not running.
func (h *handle) remove(ctx context.Context) error {
	h.op.Lock()
	defer h.op.Unlock()
	if err := fpUndefined.Hit(ctx); err != nil {
		return err
	}
	def, _, _ := h.snapshot()
	if def.SerialLog != "" { // it is empty if the definition was damaged
		if err := os.Remove(logPath(def)); err != nil && !isNotExist(err) {
			return err
		}
	}
	return errors.Join(removeSockets(def.Dir), os.RemoveAll(h.dir))
}

// removeSockets removes the driver's files from Definition.Dir, and the directory itself if it is then empty.
func removeSockets(dir string) error {
	if dir == "" {
		return nil
	}
	names := []string{monitorSocket, machine.SerialInput, machine.AgentSocket, machine.QGASocket, virtiofsd.SocketName}
	for _, socket := range machine.SessionSockets {
		names = append(names, socket, machine.LockFile(socket))
	}
	for _, name := range names {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !isNotExist(err) {
			return err
		}
	}
	if err := os.RemoveAll(filepath.Join(dir, machine.VNCDir)); err != nil {
		return err
	}
	_ = os.Remove(dir) // fails if it still contains other files
	return nil
}

func (d *Driver) Destroy(ctx context.Context, name string) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	return h.destroy(ctx)
}

func (d *Driver) Shutdown(ctx context.Context, name string) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	_, rec, r := h.snapshot()
	switch {
	case r != nil:
		return r.execute(ctx, "system_powerdown", nil)
	case rec.Step == stepEnded:
		return nil
	default:
		return fmt.Errorf("machine %.64s is not running: %w", name, errdefs.ErrFailedPrecondition)
	}
}

func (d *Driver) Firmware(ctx context.Context, name string) (string, error) {
	r, _, err := d.running(name)
	if err != nil {
		return "", err
	}
	var output string
	err = r.ask(ctx, "ringbuf-read", map[string]any{"device": firmwareRing, "size": boot.RingSize}, &output)
	return output, err
}

func (d *Driver) Stats(ctx context.Context, name string) (machine.Stats, error) {
	r, def, err := d.running(name)
	if err != nil {
		return machine.Stats{}, err
	}
	return r.stats(ctx, def)
}

// running returns the run of a machine, or errdefs.ErrFailedPrecondition if the machine is not running.
func (d *Driver) running(name string) (*run, machine.Definition, error) {
	h, err := d.find(name)
	if err != nil {
		return nil, machine.Definition{}, err
	}
	def, _, r := h.snapshot()
	if r == nil {
		return nil, def, fmt.Errorf("machine %.64s is not running: %w", name, errdefs.ErrFailedPrecondition)
	}
	return r, def, nil
}
