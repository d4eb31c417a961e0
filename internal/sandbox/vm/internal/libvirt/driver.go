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
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
)

var (
	fpDefined   = failpoint.New("libvirt.define.domain")
	fpUndefined = failpoint.New("libvirt.undefine.forgotten")
	fpOpened    = failpoint.New("libvirt.start.opened")
	fpReady     = failpoint.New("libvirt.start.defined")
	fpGranted   = failpoint.New("libvirt.start.granted")
	fpCreated   = failpoint.New("libvirt.start.created")
	fpKnown     = failpoint.New("libvirt.end.known")
	fpWritten   = failpoint.New("libvirt.end.written")
	fpKilling   = failpoint.New("libvirt.destroy.intent")
	fpKilled    = failpoint.New("libvirt.destroy.dead")
)

// DefaultURI is the URI of the host's libvirtd.
const DefaultURI = "qemu:///system"

// Config configures the driver.
type Config struct {
	// URI selects the libvirtd; "" means DefaultURI. "?socket=/path" overrides the path of libvirt's socket.
	URI string
	// Dir is the directory of the tap service's socket and of the files that libvirt executes or checks. Every user
	// must be able to enter it, because libvirt executes the wrapper as the machine's user. The directory contains no
	// secrets and can be on a tmpfs. New creates it.
	Dir string
	// Owner is the daemon's root directory. It marks the domains that belong to this daemon.
	Owner string
	// Emulator is the path or name of QEMU; "" means qemu.ProgramName. Wrapper is the path of tripod-vmwrap; "" means
	// the result of FindWrapper.
	Emulator, Wrapper string
	// Virtiofsd is the path of virtiofsd. If it is empty, machines with virtio-fs shares are refused.
	Virtiofsd string
	// Accel is qemu.AccelKVM or qemu.AccelTCG.
	Accel  string
	Opener machine.Opener
	// Cgroup is the tree that contains Definition.Cgroup.
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
	ctx     context.Context // canceled by Close
	end     context.CancelFunc
	bg      sync.WaitGroup

	mu       sync.Mutex
	sink     func(machine.Event)
	machines map[string]*instance
	model    string // libvirt's security model, once known
}

var _ machine.Driver = (*Driver)(nil)

// instance is a defined machine.
type instance struct {
	mu     sync.Mutex
	def    machine.Definition
	domain golibvirt.Domain
	state  machine.State
	run    run
	proc   *process.Process   // QEMU, while it runs
	shares *virtiofsd.Servers // of the current run
	launch *launch            // set during Start
	ended  chan struct{}      // closed at the end of the current run
	// retryPending is set while retryRefresh waits for its next query.
	retryPending bool
}

// FindWrapper returns the path of tripod-vmwrap: the one in TRIPOD_VMWRAP_BIN, the one beside this process's
// executable, or the one in PATH. It returns errdefs.ErrNotFound if it finds none.
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
	return "", fmt.Errorf("the driver libvirt needs %s, which is neither beside this program nor in PATH: %w", vmwrap.ProgramName,
		errdefs.ErrNotFound)
}

// New returns a driver and starts its tap service. libvirtd need not be running yet. New returns errdefs.ErrNotFound if
// the emulator or the wrapper is missing.
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
			d.log.Error("tap service ended", "err", err)
		}
	})
	d.link.connected, d.link.event = d.refreshAll, d.domainEvent
	d.bg.Go(func() { d.link.maintain(ctx) })
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
		return c, fmt.Errorf("the driver libvirt does not support vm.accel %q, only kvm and tcg: %w", c.Accel, errdefs.ErrInvalidArgument)
	}
	if !filepath.IsAbs(c.Dir) || !filepath.IsAbs(c.Wrapper) || c.Owner == "" {
		return c, fmt.Errorf("directory %q and wrapper %q must be absolute paths, and owner %q must not be empty: %w", c.Dir, c.Wrapper, c.Owner,
			errdefs.ErrInvalidArgument)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// Ready implements machine.Driver. It returns nil if libvirtd is connected and answers.
func (d *Driver) Ready() error { return d.link.ready() }

func (d *Driver) Name() string { return "libvirt" }

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

// running returns the domain and definition of a machine, or errdefs.ErrFailedPrecondition if the machine is not
// running.
func (d *Driver) running(name string) (golibvirt.Domain, machine.Definition, error) {
	in, err := d.find(name)
	if err != nil {
		return golibvirt.Domain{}, machine.Definition{}, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.state.Phase != machine.Running {
		err = fmt.Errorf("machine %s is not running: %w", name, errdefs.ErrFailedPrecondition)
	}
	return in.domain, in.def, err
}

func (d *Driver) Define(ctx context.Context, def machine.Definition) error {
	if err := d.validate(def); err != nil {
		return err
	}
	if d.cfg.Virtiofsd == "" && def.HasVirtiofs() {
		return fmt.Errorf("machine %s has virtio-fs shares, but there is no virtiofsd: %w", def.Name, errdefs.ErrFailedPrecondition)
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
			return fmt.Errorf("replace the definition of machine %s: it is running: %w", def.Name, errdefs.ErrFailedPrecondition)
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

// defineDomain defines the machine's domain in libvirt. The secret is for the next start.
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
	if def.LibvirtCPU != "" { // the user wrote this part, so libvirt must validate it
		flags = golibvirt.DomainDefineValidate
	}
	return ask(ctx, d.link, "define domain "+domainName(def.Name), func(l *golibvirt.Libvirt) (golibvirt.Domain, error) {
		return l.DomainDefineXMLFlags(text, flags)
	})
}

// securityModel returns the security model with which libvirt confines domains, besides running each as its user:
// "apparmor", "selinux" or "none". It queries libvirt only once.
func (d *Driver) securityModel(ctx context.Context) (string, error) {
	d.mu.Lock()
	model := d.model
	d.mu.Unlock()
	if model != "" {
		return model, nil
	}
	raw, err := ask(ctx, d.link, "query libvirt's security model", func(c *golibvirt.Libvirt) ([]int8, error) {
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

// State implements machine.Driver. It does not query libvirt, because events keep the state current.
func (d *Driver) State(_ context.Context, name string) (machine.State, error) {
	in, err := d.find(name)
	if err != nil {
		return machine.State{}, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.state, nil
}

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
	if err := d.removeMachine(ctx, domain, def); err != nil {
		return err
	}
	d.mu.Lock()
	delete(d.machines, name)
	d.mu.Unlock()
	return nil
}

// removeMachine removes the files and the domain of a machine that is not running. It removes the domain last, because
// Recover finds the machine by its domain.
func (d *Driver) removeMachine(ctx context.Context, domain golibvirt.Domain, def machine.Definition) error {
	if err := errors.Join(d.layout.remove(def.Name), removeRun(def.StateDir), virtiofsd.RemoveLogs(def.StateDir),
		os.RemoveAll(def.Dir)); err != nil {
		return err
	}
	if err := fpUndefined.Hit(ctx); err != nil {
		return err
	}
	return d.link.undefine(ctx, domain)
}
