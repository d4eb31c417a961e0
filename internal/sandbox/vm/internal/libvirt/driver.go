package libvirt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"sync"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
)

// DefaultURI is the libvirtd of the host.
const DefaultURI = "qemu:///system"

// Config configures the driver.
type Config struct {
	// URI says which libvirtd; "" is DefaultURI. "?socket=/path" names another socket than libvirt's own.
	URI string
	// Dir is where the tap service listens and what libvirt executes and looks at is. Every user must get there: libvirt
	// executes the wrapper as the machine's user. Nothing secret is in it. It is made, and may be on a tmpfs.
	Dir string
	// Owner marks the domains that are ours among those of this libvirtd: the daemon's root directory.
	Owner string
	// Emulator is QEMU, a path or a name; "" is qemu.ProgramName. Wrapper is tripod-vmwrap; "" is FindWrapper's.
	Emulator, Wrapper string
	// Virtiofsd is the program of that name, as package virtiofsd finds it; "": machines with shares by virtio-fs are refused.
	Virtiofsd string
	// Accel is qemu.AccelKVM or qemu.AccelTCG.
	Accel string
	// Opener opens taps.
	Opener machine.Opener
	// Cgroup knows the hierarchies in which Definition.Cgroup is.
	Cgroup cgroup.Tree
	Logger *slog.Logger
}

// Driver is a machine.Driver.
type Driver struct {
	cfg     Config
	log     *slog.Logger
	layout  layout
	link    *link
	service *fdpass.Server
	ctx     context.Context // ends with Close
	end     context.CancelFunc
	bg      sync.WaitGroup

	mu       sync.Mutex
	sink     func(machine.Event)
	machines map[string]*instance
	model    string // libvirt's security model, once known
}

var _ machine.Driver = (*Driver)(nil)

// instance is a machine that is defined.
type instance struct {
	mu     sync.Mutex
	def    machine.Definition
	domain golibvirt.Domain
	state  machine.State
	run    run
	proc   *process.Process   // QEMU, while it runs and is known
	shares *virtiofsd.Servers // of a run that is under way
	launch *launch            // while Start is under way
	ended  chan struct{}      // closed at the end of the run that is under way
	// lookPending says that another look at the domain will follow.
	lookPending bool
}

// FindWrapper looks for tripod-vmwrap: named by TRIPOD_VMWRAP_BIN, beside the executable of this process, in PATH.
// errdefs.ErrNotFound.
func FindWrapper() (string, error) {
	candidates := []string{os.Getenv("TRIPOD_VMWRAP_BIN")}
	if self, err := os.Executable(); err == nil {
		candidates = append(candidates, filepath.Join(filepath.Dir(self), vmwrap.ProgramName))
	}
	for _, name := range append(candidates, vmwrap.ProgramName) {
		if name == "" {
			continue
		}
		if found, err := exec.LookPath(name); err == nil {
			return filepath.Abs(found)
		}
	}
	return "", fmt.Errorf("%s, which the driver libvirt needs, is neither beside this program nor in PATH: %w", vmwrap.ProgramName, errdefs.ErrNotFound)
}

// New makes a driver, whose tap service listens from now on. libvirtd need not be there yet. It is errdefs.ErrNotFound when
// there is no emulator or no wrapper.
func New(cfg Config) (*Driver, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancel(context.Background())
	d := &Driver{cfg: cfg, log: cfg.Logger, ctx: ctx, end: end, machines: map[string]*instance{}, sink: func(machine.Event) {}}
	if d.layout, err = newLayout(cfg.Dir, cfg.Wrapper, cfg.Emulator); err != nil {
		end()
		return nil, err
	}
	if d.link, err = newLink(cfg.URI, d.log); err != nil {
		end()
		return nil, err
	}
	listener, err := d.layout.listen()
	if err != nil {
		end()
		return nil, err
	}
	d.service = fdpass.NewServer(listener, d.grant, d.log)
	d.bg.Go(func() {
		if err := d.service.Serve(); err != nil {
			d.log.Error("the tap service has ended", "err", err)
		}
	})
	d.link.connected, d.link.event = d.lookAtAll, d.lookAtDomain
	d.bg.Go(func() { d.link.keep(ctx) })
	return d, nil
}

func (c Config) complete() (Config, error) {
	if c.URI == "" {
		c.URI = DefaultURI
	}
	if c.Emulator == "" {
		c.Emulator = qemu.ProgramName
	}
	found, err := exec.LookPath(c.Emulator)
	if err != nil {
		return c, fmt.Errorf("%w; install qemu-system-x86, or set vm.emulator (%w)", err, errdefs.ErrNotFound)
	}
	if c.Emulator, err = filepath.Abs(found); err != nil {
		return c, err
	}
	if c.Wrapper == "" {
		if c.Wrapper, err = FindWrapper(); err != nil {
			return c, err
		}
	}
	if c.Accel != qemu.AccelKVM && c.Accel != qemu.AccelTCG {
		return c, fmt.Errorf("the driver libvirt runs machines by kvm or tcg, not by %q: %w", c.Accel, errdefs.ErrInvalidArgument)
	}
	if !filepath.IsAbs(c.Dir) || !filepath.IsAbs(c.Wrapper) || c.Owner == "" {
		return c, fmt.Errorf("directory %q and wrapper %q must be absolute, and an owner (%q) named: %w", c.Dir, c.Wrapper, c.Owner, errdefs.ErrInvalidArgument)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// Ready implements machine.Driver: libvirtd is connected and answers.
func (d *Driver) Ready() error { return d.link.ready() }

// Name implements machine.Driver.
func (d *Driver) Name() string { return "libvirt" }

// Close implements machine.Driver.
func (d *Driver) Close() error {
	d.end()
	err := d.service.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	d.mu.Lock()
	for _, in := range d.machines {
		in.mu.Lock()
		in.proc.Close()
		in.shares.Close()
		in.mu.Unlock()
	}
	d.mu.Unlock()
	d.bg.Wait()
	return err
}

func (d *Driver) find(name string) (*instance, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	in := d.machines[name]
	if in == nil {
		return nil, fmt.Errorf("machine %.64s is not defined: %w", name, errdefs.ErrNotFound)
	}
	return in, nil
}

// Define implements machine.Driver.
func (d *Driver) Define(ctx context.Context, def machine.Definition) error {
	if err := d.validate(def); err != nil {
		return err
	}
	if d.cfg.Virtiofsd == "" && def.HasVirtiofs() {
		return fmt.Errorf("machine %s: shares by virtio-fs, and there is no virtiofsd: %w", def.Name, errdefs.ErrFailedPrecondition)
	}
	in, err := d.find(def.Name)
	if err == nil {
		in.mu.Lock()
		same, running, before := reflect.DeepEqual(in.def, def), in.state.Phase == machine.Running || in.launch != nil, in.domain
		in.mu.Unlock()
		if same {
			return nil
		}
		if running {
			return fmt.Errorf("machine %s runs: it cannot be defined otherwise: %w", def.Name, errdefs.ErrFailedPrecondition)
		}
		if uuidText(before.UUID) != def.UUID {
			if err := d.link.undefine(ctx, before); err != nil {
				return err
			}
		}
	}
	domain, err := d.defineDomain(ctx, def, "")
	if err == nil {
		err = fpDefined.Hit(ctx)
	}
	if err != nil {
		return err
	}
	if in != nil {
		in.mu.Lock()
		defer in.mu.Unlock()
		in.def, in.domain = def, domain
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines[def.Name] = &instance{def: def, domain: domain, state: machine.State{Phase: machine.Defined}}
	return nil
}

// defineDomain tells libvirt of a machine. secret is for its next start.
func (d *Driver) defineDomain(ctx context.Context, def machine.Definition, secret string) (golibvirt.Domain, error) {
	model, err := d.securityModel(ctx)
	if err != nil {
		return golibvirt.Domain{}, err
	}
	text, err := d.domainXML(def, secret, model)
	if err != nil {
		return golibvirt.Domain{}, err
	}
	var flags golibvirt.DomainDefineFlags
	if def.LibvirtCPU != "" { // somebody else wrote a part of it
		flags = golibvirt.DomainDefineValidate
	}
	return ask(ctx, d.link, "define domain "+domainName(def.Name), func(l *golibvirt.Libvirt) (golibvirt.Domain, error) {
		return l.DomainDefineXMLFlags(text, flags)
	})
}

// securityModel asks libvirt, once, by what it confines domains besides users: "apparmor", "selinux", "none".
func (d *Driver) securityModel(ctx context.Context) (string, error) {
	d.mu.Lock()
	model := d.model
	d.mu.Unlock()
	if model != "" {
		return model, nil
	}
	raw, err := ask(ctx, d.link, "libvirt's security model", func(c *golibvirt.Libvirt) ([]int8, error) {
		model, _, err := c.NodeGetSecurityModel()
		return model, err
	})
	if err != nil {
		return "", err
	}
	for _, c := range raw { // a C string
		if c == 0 {
			break
		}
		model += string(rune(c))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.model = model
	return model, nil
}

// State implements machine.Driver. It never queries libvirt: events keep the state.
func (d *Driver) State(_ context.Context, name string) (machine.State, error) {
	in, err := d.find(name)
	if err != nil {
		return machine.State{}, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.state, nil
}

// Undefine implements machine.Driver.
func (d *Driver) Undefine(ctx context.Context, name string) error {
	in, err := d.find(name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := d.Destroy(ctx, name); err != nil {
		return err
	}
	in.mu.Lock()
	domain, def := in.domain, in.def
	in.mu.Unlock()
	if err := d.forget(ctx, domain, def); err != nil {
		return err
	}
	d.mu.Lock()
	delete(d.machines, name)
	d.mu.Unlock()
	return nil
}

// forget removes all that there is of a machine that does not run. The domain, by which it would be found again, goes last.
func (d *Driver) forget(ctx context.Context, domain golibvirt.Domain, def machine.Definition) error {
	if err := errors.Join(d.layout.forget(def.Name), removeRun(def.StateDir), virtiofsd.RemoveLogs(def.StateDir), os.RemoveAll(def.Dir)); err != nil {
		return err
	}
	if err := fpUndefined.Hit(ctx); err != nil {
		return err
	}
	return d.link.undefine(ctx, domain)
}
