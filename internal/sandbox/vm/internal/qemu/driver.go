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

// ProgramName is the default emulator.
const ProgramName = "qemu-system-x86_64"

// Accelerators of a machine.
const (
	AccelAuto = "auto"
	AccelKVM  = "kvm"
	AccelTCG  = "tcg"
)

const (
	// startTimeout bounds the time from QEMU's start to the guest's first instruction. An idle host needs 40–100 ms.
	startTimeout = time.Minute
	// monitorTimeout bounds a command of the monitor.
	monitorTimeout = time.Second
	// killTimeout bounds the time from SIGKILL to the end of the process. The process can hang in a system call if a
	// disk is dead.
	killTimeout = 30 * time.Second
)

// Config configures the driver.
type Config struct {
	// Root is the directory of the machines' records. It is on a disk; only root has access to it.
	Root string
	// Emulator is the path or name of QEMU; "" means ProgramName. New looks a name up in PATH.
	Emulator string
	// Virtiofsd is the path of virtiofsd. If it is empty, machines with virtio-fs shares are refused.
	Virtiofsd string
	// Accel is AccelAuto, AccelKVM or AccelTCG; "" means AccelAuto.
	Accel string
	// UID and GID are the user and group of the QEMU that Probe starts; 0 means 65534.
	UID, GID int
	Opener   machine.Opener
	// Cgroup is the tree that contains Definition.Cgroup.
	Cgroup cgroup.Tree
	Logger *slog.Logger
}

// Driver is a machine.Driver.
type Driver struct {
	cfg Config
	log *slog.Logger
	ctx context.Context // canceled by Close
	end context.CancelFunc
	bg  sync.WaitGroup

	probing  sync.Mutex
	contents contents

	mu       sync.Mutex
	verdict  *Verdict
	sink     func(machine.Event)
	machines map[string]*handle
}

var _ machine.Driver = (*Driver)(nil)

// New returns a driver. It returns errdefs.ErrNotFound if the emulator is missing.
func New(cfg Config) (*Driver, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.Root, 0o700); err != nil && !errors.Is(err, unix.EROFS) { // running machines work even on a read-only disk
		return nil, fmt.Errorf("make the machines' directory: %w", err)
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
		return c, fmt.Errorf("vm.accel is %q, not auto, kvm or tcg: %w", c.Accel, errdefs.ErrInvalidArgument)
	}
	if !filepath.IsAbs(c.Root) {
		return c, fmt.Errorf("the machines' directory %q is not absolute: %w", c.Root, errdefs.ErrInvalidArgument)
	}
	if c.UID <= 0 || c.GID <= 0 {
		c.UID, c.GID = 65534, 65534
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// Ready implements machine.Driver. It always returns nil, because the driver needs no other daemon.
func (d *Driver) Ready() error { return nil }

func (d *Driver) Name() string { return "qmp" }

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

func (d *Driver) Define(ctx context.Context, def machine.Definition) error {
	if err := Validate(def); err != nil {
		return err
	}
	if d.cfg.Virtiofsd == "" && def.HasVirtiofs() {
		return fmt.Errorf("machine %.64s has virtio-fs shares, but there is no virtiofsd: %w", def.Name, errdefs.ErrFailedPrecondition)
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

// State implements machine.Driver. It does not query QEMU, because watch keeps the state current.
func (d *Driver) State(_ context.Context, name string) (machine.State, error) {
	h, err := d.find(name)
	if err != nil {
		return machine.State{}, err
	}
	return h.state(), nil
}

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

// report sends the end of a machine to the sink.
func (d *Driver) report(name string, s machine.State) {
	d.mu.Lock()
	sink := d.sink
	d.mu.Unlock()
	sink(machine.Event{Name: name, State: s})
}

// trimLogs trims QEMU's logs every minute. A guest can make QEMU write to its log, which shares a file system with the
// serial log.
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
