package vm

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// hypervisor is a fake driver, whose machines exist only in memory. It outlives the backends that use it.
type hypervisor struct {
	mu       sync.Mutex
	sink     func(machine.Event)
	machines map[string]*guest
	// refuse, if not nil, makes starts fail.
	refuse error
	// deaf makes guests ignore the power button.
	deaf bool
	// gone makes guests end just before the power button is pressed.
	gone bool
	// firmware is the output of each machine's firmware, which is returned once.
	firmware string
	// mute makes guests write nothing to the console.
	mute bool
	// destroyed, if not nil, is called by Destroy after it has reported the end.
	destroyed func()
	// memories lists the sizes that were requested of SetMemory. memoryErr is its answer. added are the CPUs of AddCPUs.
	memories  []uint64
	memoryErr error
	added     []int
	// plugErr is Plug's answer, if it is not nil.
	plugErr error
}

type guest struct {
	definition machine.Definition
	state      machine.State
	pressed    int
	plugged    map[int]machine.PlugDisk

	firmwareRead bool
}

func (d *hypervisor) Name() string { return "fake" }

func (d *hypervisor) Ready() error { return nil }

func (d *hypervisor) Recover(_ context.Context, names []string, sink func(machine.Event)) (map[string]machine.State, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sink = sink
	found := map[string]machine.State{}
	for name, g := range d.machines {
		if slices.Contains(names, name) {
			found[name] = g.state
		} else {
			delete(d.machines, name)
		}
	}
	return found, nil
}

func (d *hypervisor) Define(_ context.Context, def machine.Definition) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.machines[def.Name]
	if g == nil {
		g = &guest{state: machine.State{Phase: machine.Defined}}
		d.machines[def.Name] = g
	}
	g.definition = def
	return nil
}

func (d *hypervisor) Start(_ context.Context, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.machines[name]
	if g == nil {
		return errdefs.ErrNotFound
	}
	now := time.Now()
	if d.refuse != nil {
		g.state = machine.State{Phase: machine.Ended, Cause: machine.CauseStart, StartedAt: now, FinishedAt: now, ExitCode: 1,
			Message: d.refuse.Error()}
		return fmt.Errorf("%w: %w", d.refuse, errdefs.ErrFailedPrecondition)
	}
	if err := os.MkdirAll(g.definition.Dir, 0o700); err != nil {
		return err
	}
	g.state, g.firmwareRead = machine.State{Phase: machine.Running, Pid: os.Getpid(), StartedAt: now}, false
	if d.mute {
		return nil
	}
	return say(g, "booted\n")
}

// say writes to the guest's console.
func say(g *guest, text string) error {
	f, err := os.OpenFile(g.definition.SerialLog, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(text)
	return err
}

func (d *hypervisor) Shutdown(_ context.Context, name string) error {
	d.mu.Lock()
	g := d.machines[name]
	g.pressed++
	deaf, gone := d.deaf, d.gone
	d.mu.Unlock()
	if gone {
		defer d.end(name, machine.CausePowerOff, 0)
		return errdefs.ErrUnavailable
	}
	if !deaf {
		d.end(name, machine.CausePowerOff, 0)
	}
	return nil
}

// end ends a machine, as if it ended on its own.
func (d *hypervisor) end(name string, cause machine.Cause, code int32) {
	d.mu.Lock()
	g, sink := d.machines[name], d.sink
	if g == nil || g.state.Phase != machine.Running {
		d.mu.Unlock()
		return
	}
	_ = say(g, "the last word")
	g.state = machine.State{Phase: machine.Ended, Cause: cause, ExitCode: code, StartedAt: g.state.StartedAt, FinishedAt: time.Now(),
		Message: string(cause)}
	state := g.state
	d.mu.Unlock()
	if sink != nil {
		sink(machine.Event{Name: name, State: state})
	}
}

func (d *hypervisor) Destroy(_ context.Context, name string) error {
	d.end(name, machine.CauseKilled, sandbox.ExitKilled)
	if d.destroyed != nil {
		d.destroyed()
	}
	return nil
}

func (d *hypervisor) State(_ context.Context, name string) (machine.State, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if g := d.machines[name]; g != nil {
		return g.state, nil
	}
	return machine.State{}, errdefs.ErrNotFound
}

func (d *hypervisor) SetMemory(_ context.Context, name string, memory uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.memories = append(d.memories, memory)
	return d.memoryErr
}

func (d *hypervisor) AddCPUs(_ context.Context, _ string, cpus int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.added = append(d.added, cpus)
	return nil
}

func (d *hypervisor) Plug(_ context.Context, name string, disk machine.PlugDisk) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.plugErr != nil {
		return d.plugErr
	}
	g := d.machines[name]
	if g.plugged == nil {
		g.plugged = map[int]machine.PlugDisk{}
	}
	if _, has := g.plugged[disk.LUN]; !has {
		g.plugged[disk.LUN] = disk
	}
	return nil
}

func (d *hypervisor) Unplug(_ context.Context, name string, lun int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.machines[name].plugged, lun)
	return nil
}

func (d *hypervisor) Save(context.Context, string, string) error { return errdefs.ErrNotImplemented }
func (d *hypervisor) SaveKey(context.Context, machine.Definition) (string, error) {
	return "", errdefs.ErrNotImplemented
}

func (d *hypervisor) Stats(context.Context, string) (machine.Stats, error) {
	return machine.Stats{Memory: 1 << 20, Blocks: map[string]machine.BlockStats{rootID: {ReadOps: 1}}}, nil
}

func (d *hypervisor) Firmware(_ context.Context, name string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.machines[name]
	if g == nil || g.state.Phase != machine.Running {
		return "", errdefs.ErrFailedPrecondition
	}
	if g.firmwareRead {
		return "", nil
	}
	g.firmwareRead = true
	return d.firmware, nil
}

// repeatFirmware makes a machine's firmware write its output again.
func (d *hypervisor) repeatFirmware(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines[name].firmwareRead = false
}

func (d *hypervisor) Undefine(ctx context.Context, name string) error {
	_ = d.Destroy(ctx, name)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.machines, name)
	return nil
}

// Close discards the sink, as if the daemon's process had ended.
func (d *hypervisor) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sink = nil
	return nil
}

func (d *hypervisor) guest(name string) guest {
	d.mu.Lock()
	defer d.mu.Unlock()
	if g := d.machines[name]; g != nil {
		return *g
	}
	return guest{}
}
