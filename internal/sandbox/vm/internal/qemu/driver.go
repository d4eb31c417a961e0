package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// ProgramName is the emulator that is looked for when none is configured.
const ProgramName = "qemu-system-x86_64"

// What accelerates a machine.
const (
	AccelAuto = "auto"
	AccelKVM  = "kvm"
	AccelTCG  = "tcg"
)

const (
	// startTime bounds the time from QEMU's start to its guest's first instruction. It is 40–100 ms on a quiet machine.
	startTime = time.Minute
	// askTime is how long a monitor is waited for by those who only want to know.
	askTime = time.Second
	// endTime bounds the end of a process after SIGKILL. One in the middle of a system call on a dead disk takes its time.
	endTime = 30 * time.Second
)

// Config configures the driver.
type Config struct {
	// Root is the directory of its records, on a disk; only root has access to it.
	Root string
	// Emulator is QEMU, a path or a name; "" is ProgramName. It is found when the driver is made.
	Emulator string
	// Virtiofsd is the program of that name, as package virtiofsd finds it; "": machines with shares by virtio-fs are refused.
	Virtiofsd string
	// Accel is AccelAuto, AccelKVM or AccelTCG; "" is AccelAuto.
	Accel string
	// UID and GID are what QEMU runs as while Probe tries it; 0 is 65534.
	UID, GID int
	// Opener opens taps.
	Opener machine.Opener
	// Cgroup knows the hierarchies in which Definition.Cgroup is.
	Cgroup cgroup.Tree
	Logger *slog.Logger
}

// Driver is a machine.Driver.
type Driver struct {
	cfg Config
	log *slog.Logger
	ctx context.Context // ends with Close
	end context.CancelFunc
	bg  sync.WaitGroup

	probing sync.Mutex

	mu       sync.Mutex
	verdict  *Verdict
	sink     func(machine.Event)
	machines map[string]*handle
}

var _ machine.Driver = (*Driver)(nil)

// New makes a driver. It is errdefs.ErrNotFound when there is no emulator.
func New(cfg Config) (*Driver, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.Root, 0o700); err != nil && !errors.Is(err, unix.EROFS) { // machines that run can be served
		return nil, fmt.Errorf("the directory of the machines: %w", err)
	}
	ctx, end := context.WithCancel(context.Background())
	d := &Driver{cfg: cfg, log: cfg.Logger, ctx: ctx, end: end, machines: map[string]*handle{}, sink: func(machine.Event) {}}
	d.bg.Go(d.trimLogs)
	return d, nil
}

func (c Config) complete() (Config, error) {
	if c.Emulator == "" {
		c.Emulator = ProgramName
	}
	path, err := exec.LookPath(c.Emulator)
	if err != nil {
		return c, fmt.Errorf("%w; install qemu-system-x86, or set vm.emulator (%w)", err, errdefs.ErrNotFound)
	}
	if c.Emulator, err = filepath.Abs(path); err != nil {
		return c, err
	}
	switch c.Accel {
	case "":
		c.Accel = AccelAuto
	case AccelAuto, AccelKVM, AccelTCG:
	default:
		return c, fmt.Errorf("vm.accel %q is neither auto nor kvm nor tcg: %w", c.Accel, errdefs.ErrInvalidArgument)
	}
	if !filepath.IsAbs(c.Root) {
		return c, fmt.Errorf("the directory of the machines, %q, is not absolute: %w", c.Root, errdefs.ErrInvalidArgument)
	}
	if c.UID <= 0 || c.GID <= 0 {
		c.UID, c.GID = 65534, 65534
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// Ready implements machine.Driver: nobody else is needed.
func (d *Driver) Ready() error { return nil }

// Name implements machine.Driver.
func (d *Driver) Name() string { return "qmp" }

// Close implements machine.Driver.
func (d *Driver) Close() error {
	d.end()
	d.bg.Wait()
	return nil
}

func (d *Driver) find(name string) (*handle, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.machines[name]
	if h == nil {
		return nil, fmt.Errorf("machine %.64s is not defined: %w", name, errdefs.ErrNotFound)
	}
	return h, nil
}

// Define implements machine.Driver.
func (d *Driver) Define(ctx context.Context, def machine.Definition) error {
	if err := validate(def); err != nil {
		return err
	}
	if d.cfg.Virtiofsd == "" && def.HasVirtiofs() {
		return fmt.Errorf("machine %.64s: shares by virtio-fs, and there is no virtiofsd: %w", def.Name, errdefs.ErrFailedPrecondition)
	}
	d.mu.Lock()
	h := d.machines[def.Name]
	if h == nil {
		h = newHandle(d, def)
		d.machines[def.Name] = h
	}
	d.mu.Unlock()
	return h.define(ctx, def)
}

// State implements machine.Driver. It never queries QEMU: the watch keeps the state.
func (d *Driver) State(_ context.Context, name string) (machine.State, error) {
	h, err := d.find(name)
	if err != nil {
		return machine.State{}, err
	}
	return h.state(), nil
}

// Undefine implements machine.Driver.
func (d *Driver) Undefine(ctx context.Context, name string) error {
	h, err := d.find(name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err := h.destroy(ctx); err != nil {
		return err
	}
	if err := h.remove(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.machines, name)
	return nil
}

// tell reports an end.
func (d *Driver) tell(name string, s machine.State) {
	d.mu.Lock()
	sink := d.sink
	d.mu.Unlock()
	sink(machine.Event{Name: name, State: s})
}

// trimLogs keeps what QEMU says short: a guest can make it talk, and it is in the place of its console's.
func (d *Driver) trimLogs() {
	tick := time.NewTicker(time.Minute)
	defer tick.Stop()
	for {
		select {
		case <-d.ctx.Done():
			return
		case <-tick.C:
		}
		d.mu.Lock()
		all := slices.Collect(maps.Values(d.machines))
		d.mu.Unlock()
		for _, h := range all {
			def, _, _ := h.snapshot()
			confine.TrimLog(logPath(def))
		}
	}
}
