package vm

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
	"github.com/tripod-run/tripod/internal/stats"
)

// settings holds the configuration, and the parts that Open builds from the configuration.
type settings struct {
	Config
	// Prefix precedes the pod's ID in the names of cgroups and slices.
	Prefix string
	// Plug gives the machines a controller for disks that are plugged in later, and no cloud-init image.
	Plug bool
	// Continue, if not nil, can make a machine that is about to be defined continue from a saved state.
	Continue func(context.Context, *sandbox.Pod, *machine.Definition) error
	// ScratchBase is the path of the raw image below the scratch disks; "" means that they are empty.
	ScratchBase string
	// Driver runs the machines. Backend.Close closes the driver.
	Driver machine.Driver
	// Accel may be nil. Inspect then does not report the accelerator.
	Accel accelFunc
	// Cgroup is the host's cgroup tree, the same one that the driver uses.
	Cgroup cgroup.Tree
	// Virtiofs returns nil if virtio-fs works on this host, otherwise the reason why it does not.
	Virtiofs func(context.Context) error
	// AgentDisk is the path of the disk image with the guest's agent; "" means that machines get no such disk.
	AgentDisk string
	// GuestDisk is the path of the disk image with the root that the images' initramfs mounts; "" means that machines get no
	// such disk.
	GuestDisk string
	// UEFI returns the node's UEFI firmware, or errdefs.ErrFailedPrecondition if there is none.
	UEFI    func() (boot.UEFI, error)
	Images  Images
	Network network
	Logger  *slog.Logger
}

// Images is the part of the image service that the backend uses; *image.Store implements it.
type Images interface {
	// Machine describes the disk or kernel in an image. It returns errdefs.ErrInvalidArgument if the image has neither.
	Machine(ctx context.Context, imageID string) (*disk.MachineImage, error)
	// OpenDisk opens an image's files and leases the image under the given key until CloseDisk is called. Disks returns
	// the keys of all leases.
	OpenDisk(ctx context.Context, key, imageID string) (*disk.Files, error)
	CloseDisk(ctx context.Context, key string) error
	Disks(ctx context.Context) ([]string, error)
}

// network connects machines to the pods' networks; tap.Node implements it.
type network interface {
	// Wire makes a tap for each link in the namespace and removes the link's addresses.
	Wire(ctx context.Context, netns string, o tap.Options) ([]tap.Interface, error)
	// Read returns the result that Wire has recorded.
	Read(record string) ([]tap.Interface, error)
	Unwire(ctx context.Context, netns, record string) error
	// Serve gives the guest its addresses (DHCP, router advertisements) until the returned io.Closer is closed.
	Serve(ctx context.Context, netns string, interfaces []tap.Interface, c tap.Config) (io.Closer, error)
}

// Backend is the sandbox.Backend for virtual machines. Open makes it.
type Backend struct {
	cfg     settings
	log     *slog.Logger
	cgroups resources.Cgroups
	sampler *stats.Sampler
	// tasks counts two kinds of goroutines. Some record how a machine has ended. The others watch a booting machine,
	// and end when ctx ends, if not earlier.
	tasks sync.WaitGroup
	ctx   context.Context
	end   context.CancelFunc

	ledger *ledger.Ledger[state, life]
	// templates are those of machines whose pods ask for one; nil if others look after templates.
	templates *templates.Set

	mu        sync.Mutex
	sandboxes map[string]*pod
}

var (
	_ sandbox.Backend        = (*Backend)(nil)
	_ sandbox.Execer         = (*Backend)(nil)
	_ sandbox.Attacher       = (*Backend)(nil)
	_ sandbox.Dialer         = (*Backend)(nil)
	_ sandbox.LogReopener    = (*Backend)(nil)
	_ sandbox.Updater        = (*Backend)(nil)
	_ sandbox.DiskAttacher   = (*Backend)(nil)
	_ sandbox.StatsProvider  = (*Backend)(nil)
	_ sandbox.Inspector      = (*Backend)(nil)
	_ sandbox.Readier        = (*Backend)(nil)
	_ sandbox.SessionPlanner = (*Backend)(nil)
)

// newBackend checks the settings, makes the backend's directories and returns the backend.
func newBackend(cfg settings) (*Backend, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	for _, dir := range []string{cfg.podsDir(), cfg.disksDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil && !sandbox.ReadOnlyDisk(err) {
			return nil, fmt.Errorf("vm backend: %w", err)
		}
	}
	ctx, end := context.WithCancel(context.Background())
	return &Backend{
		ctx: ctx, end: end, cfg: cfg, log: cfg.Logger, cgroups: resources.Cgroups{Tree: cfg.Cgroup, Overhead: cfg.VM.MemoryOverhead},
		sampler:   stats.NewSampler(8192),
		ledger:    ledger.New[state, life](format, func(_, id string) string { return cfg.containerFile(id) }, cfg.Logger),
		sandboxes: map[string]*pod{},
	}, nil
}

// Close closes the driver, the consoles and the responders. The machines keep running.
func (b *Backend) Close() error {
	if b.templates != nil {
		b.templates.Close()
	}
	b.ledger.ReportTo(nil)
	b.mu.Lock()
	pods := b.sandboxes
	b.sandboxes = map[string]*pod{}
	b.mu.Unlock()
	b.end()
	err := b.cfg.Driver.Close() // from now on, the driver reports no events
	b.tasks.Wait()
	for _, h := range b.ledger.All() {
		if _, l := h.Snapshot(); l != nil {
			l.close()
		}
	}
	for _, p := range pods {
		p.closeResponder()
	}
	return err
}

func (c settings) check() error {
	for name, path := range map[string]string{"Root": c.Root, "RunDir": c.RunDir} {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return fmt.Errorf("vm backend: %s %q is not an absolute, clean path: %w", name, path, errdefs.ErrInvalidArgument)
		}
	}
	if c.Driver == nil || c.UEFI == nil || c.Images == nil || c.Network == nil || len(c.Cgroup.Roots) == 0 {
		return fmt.Errorf("vm backend: Driver, UEFI, Images, Network or Cgroup is missing: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}

func (c Config) disksDir() string             { return filepath.Join(c.Root, "pods") }
func (c Config) diskDir(id string) string     { return filepath.Join(c.disksDir(), id) }
func (c Config) overlayFile(id string) string { return filepath.Join(c.diskDir(id), "root.qcow2") }

// ScratchFile returns the path of a scratch disk of a machine.
func (c Config) ScratchFile(id, disk string) string {
	return filepath.Join(c.diskDir(id), disk+".qcow2")
}
func (c Config) nvramFile(id string) string     { return filepath.Join(c.diskDir(id), "nvram.fd") }
func (c Config) cloudInitFile(id string) string { return filepath.Join(c.diskDir(id), "cidata.iso") }
func (c Config) serialDir(id string) string     { return filepath.Join(c.podDir(id), "console") }
func (c Config) serialLog(id string) string     { return filepath.Join(c.serialDir(id), "serial.log") }
func (c Config) consoleFile(id string) string   { return filepath.Join(c.diskDir(id), "console.json") }
func (c Config) podsDir() string                { return filepath.Join(c.RunDir, "pods") }
func (c Config) podDir(id string) string        { return filepath.Join(c.podsDir(), id) }
func (c Config) podFile(id string) string       { return filepath.Join(c.podDir(id), "pod.json") }
func (c Config) containerFile(id string) string { return filepath.Join(c.podDir(id), "container.json") }
func (c Config) tapsFile(id string) string      { return filepath.Join(c.podDir(id), "taps.json") }
func (c Config) machineDir(id string) string    { return filepath.Join(c.podDir(id), "vm") }
func (c Config) socket(id, name string) string  { return filepath.Join(c.machineDir(id), name) }

// Capabilities implements sandbox.Backend.
func (b *Backend) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{MaxContainers: 1, UserNamespaces: true}
}

// Ready implements sandbox.Readier.
func (b *Backend) Ready() error {
	if err := b.cfg.Driver.Ready(); err != nil {
		return fmt.Errorf("driver %s: %w", b.cfg.Driver.Name(), err)
	}
	return nil
}
