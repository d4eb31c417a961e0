package wasm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/stats"
)

// Config says where the backend keeps things and how it runs components.
type Config struct {
	// Root holds compiled code and the node's certificate authority and must survive a reboot. RunDir holds the pods'
	// files and the workers' sockets and must not.
	Root, RunDir string
	// Program is the path of tripod-wasm; empty: it is beside the executable of this process, or in PATH.
	Program string
	// Workers says which pods share a worker process; WorkerPerNode by default.
	Workers WorkerMode
	// UID and GID are what workers and compilers run as.
	UID, GID int
	// CgroupDriver is "cgroupfs" or "systemd". CgroupParent, a path (cgroupfs) or the name of a slice (systemd), is the
	// parent of shared workers, and of those of pods that name no parent.
	CgroupDriver, CgroupParent string
	// LabelPrefix is the prefix of the labels that name a component and of the annotations that say how it is served.
	LabelPrefix string
	// LogSizeMax bounds the log file of a container, in bytes; 0: no bound.
	LogSizeMax int64
	// Instances bounds the live instances of guests in one worker, MaxMemory each linear memory in bytes; 0: the
	// worker's defaults.
	Instances int
	MaxMemory uint64
	// Connections bounds those of each pod.
	Connections connlimit.Config
	// Holdings bound what the guests of one pod hold in their worker, Concurrency what a pod's annotation may request;
	// 0: no bound.
	Holdings    Holdings
	Concurrency int
	// CompileTimeout and CompileMemory (bytes) bound the compilation of one component.
	CompileTimeout time.Duration
	CompileMemory  int64
	// LogLevel is that of the workers, as slog spells it.
	LogLevel string
}

// Holdings bound what the guests of one pod hold in their worker.
type Holdings = workerapi.Holdings

// Services are the parts of the node that the backend uses.
type Services struct {
	// Images gives components, Network sockets.
	Images  ImageStore
	Network Network
	// Spans takes the spans of the workers' requests (a serialized OTLP ExportTraceServiceRequest); nil: none are made.
	Spans func(otlp []byte)
	// Logger takes what no caller is there to receive; nil discards it.
	Logger *slog.Logger
}

// setup is what the parts of the backend are made of.
type setup struct {
	Config
	Services
}

// ImageStore is what the backend needs of the image service; Images is one.
type ImageStore interface {
	artifact.Blobs
	// Component finds the component of an image by the image's ID.
	Component(ctx context.Context, imageID string) (*artifact.Artifact, error)
	// Get finds an image by ID or reference.
	Get(ctx context.Context, refOrID string) (image.Image, error)
	// List lists all images.
	List(ctx context.Context) ([]image.Image, error)
	// Hold keeps the blobs of an image, even if it is removed, until Unhold of the same key. Holds lists all keys,
	// those of other users included.
	Hold(ctx context.Context, key, imageID string) error
	Unhold(ctx context.Context, key string) error
	Holds(ctx context.Context) ([]string, error)
}

// Images is the node's image store with the components in it.
type Images struct{ *image.Store }

// Component finds the component of an image by the image's ID.
func (i Images) Component(ctx context.Context, imageID string) (*artifact.Artifact, error) {
	return artifact.Open(ctx, i.Store, imageID)
}

// ImportFile makes an image of a binary in a file of this node; see artifact.ImportFile.
func (i Images) ImportFile(ctx context.Context, file *os.File) (image.Image, error) {
	return artifact.ImportFile(ctx, i.Store, file)
}

// Network opens sockets in the pods' network namespaces; *network.Manager is one. An empty netns is the node's.
type Network interface {
	Listen(ctx context.Context, netns, network, addr string) (*os.File, error)
}

// Backend is the sandbox.Backend of component pods. Made by Open.
type Backend struct {
	cfg      setup
	log      *slog.Logger
	cache    *cache
	keeper   *keeper
	catalog  *catalog
	tls      *authority
	watcher  *certWatcher
	sampler  *stats.Sampler
	figures  figures
	sweeping sync.WaitGroup
	stop     context.CancelFunc

	ledger *ledger.Ledger[state, life]

	mu        sync.Mutex
	sandboxes map[string]podState
}

var (
	_ sandbox.Backend       = (*Backend)(nil)
	_ sandbox.Attacher      = (*Backend)(nil)
	_ sandbox.Channeler     = (*Backend)(nil)
	_ sandbox.LogReopener   = (*Backend)(nil)
	_ sandbox.Updater       = (*Backend)(nil)
	_ sandbox.StatsProvider = (*Backend)(nil)
	_ sandbox.Inspector     = (*Backend)(nil)
)

// ProgramName is the name of the workers' program.
const ProgramName = "tripod-wasm"

// findProgram looks for tripod-wasm, unless it is configured: errdefs.ErrNotFound.
func (c *Config) findProgram() (err error) {
	if c.Program == "" {
		c.Program, err = process.FindProgram(ProgramName, "of the workers that run components")
	}
	return err
}

// Open creates the directories and finds the program. If the configuration names no program and none is found, the
// error is errdefs.ErrNotFound. Workers start when pods need them. ctx bounds this call only.
func Open(_ context.Context, c Config, s Services) (*Backend, error) {
	cfg := setup{c.withDefaults(), s}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if err := cfg.findProgram(); err != nil {
		return nil, err
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	for _, dir := range []string{cfg.Root, cfg.RunDir, cfg.podsDir(), cfg.workersDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil && !sandbox.ReadOnlyDisk(err) {
			return nil, fmt.Errorf("wasm backend: %w", err)
		}
	}
	watcher, err := newCertWatcher(cfg.Logger)
	if err != nil {
		return nil, fmt.Errorf("wasm backend: %w", err)
	}
	keeper, err := newKeeper(cfg)
	if err != nil {
		watcher.close()
		return nil, fmt.Errorf("wasm backend: %w", err)
	}
	compiler := newCompiler(cfg.Config)
	b := &Backend{
		cfg: cfg, log: cfg.Logger, cache: newCache(cfg, compiler), keeper: keeper, catalog: newCatalog(cfg.Images),
		tls: newAuthority(cfg.Root), watcher: watcher, sampler: stats.NewSampler(8192),
		ledger: ledger.New[state, life](format, func(_, id string) string { return cfg.containerFile(id) }, cfg.Logger), sandboxes: map[string]podState{},
	}
	b.keeper.exited, b.keeper.died, b.keeper.adopt, b.keeper.wanted = b.podExited, b.workerDied, b.resync, b.hasPods
	b.watcher.changed = b.certificateChanged
	ctx, stop := context.WithCancel(context.Background())
	b.stop = stop
	b.sweeping.Go(guard.Loop(b.log, "wasm upkeep", func() { b.tend(ctx) }))
	return b, nil
}

// Close leaves workers with pods running and ends the others.
func (b *Backend) Close() error {
	b.stop()
	b.sweeping.Wait()
	b.watcher.close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*endTime)
	defer cancel()
	return b.keeper.close(ctx, b.busy)
}

func (c Config) withDefaults() Config {
	if c.Workers == "" {
		c.Workers = WorkerPerNode
	}
	c.CgroupDriver, c.CgroupParent = cgroup.Defaults(c.CgroupDriver, c.CgroupParent)
	if c.LabelPrefix == "" {
		c.LabelPrefix = "vimana.host/"
	}
	if c.CompileTimeout == 0 {
		c.CompileTimeout = 2 * time.Minute
	}
	if c.CompileMemory == 0 {
		c.CompileMemory = 2 << 30
	}
	return c
}

func (c setup) check() error {
	for name, path := range map[string]string{"Root": c.Root, "RunDir": c.RunDir, "Program": c.Program} {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return fmt.Errorf("wasm backend: %s %q is not an absolute, clean path: %w", name, path, errdefs.ErrInvalidArgument)
		}
	}
	switch c.Workers {
	case WorkerPerNode, WorkerPerNamespace, WorkerPerPod:
	default:
		return fmt.Errorf("wasm backend: %q is none of node, namespace, pod: %w", c.Workers, errdefs.ErrInvalidArgument)
	}
	if _, err := exec.LookPath(c.Program); err != nil {
		return fmt.Errorf("wasm backend: %w: %w", err, errdefs.ErrUnavailable)
	}
	if c.Images == nil || c.Network == nil {
		return fmt.Errorf("wasm backend: Images or Network is missing: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}

// Capabilities implements sandbox.Backend.
func (b *Backend) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{MaxContainers: 1, Components: true, HostNetwork: true}
}

// CreateSandbox implements sandbox.Backend. The worker that the pod will need is started meanwhile.
func (b *Backend) CreateSandbox(ctx context.Context, p *sandbox.Pod) error {
	s := podState{ID: p.ID, Scope: b.keeper.scopeOf(p)}
	if err := os.MkdirAll(b.cfg.podDir(p.ID), 0o700); err != nil {
		return sandbox.DiskError(fmt.Errorf("wasm pod: %w", err))
	}
	if err := b.setPod(s); err != nil {
		return err
	}
	if !isOwn(s.Scope) && b.keeper.current(s.Scope) == nil {
		b.keeper.startAhead(s.Scope)
	}
	return fpSandboxMade.Hit(ctx)
}

// setPod records a sandbox.
func (b *Backend) setPod(s podState) error {
	if err := format.Write(b.cfg.podFile(s.ID), s); err != nil {
		return fmt.Errorf("wasm pod: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sandboxes[s.ID] = s
	return nil
}

// scopeOf is the scope in which a pod's container starts: its own after setApart.
func (b *Backend) scopeOf(p *sandbox.Pod) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if scope := b.sandboxes[p.ID].Scope; isOwn(scope) {
		return scope
	}
	return b.keeper.scopeOf(p)
}

// setApart gives a pod its own worker, whatever the configuration says, until its sandbox is removed.
func (b *Backend) setApart(p *sandbox.Pod, why string) error {
	b.log.Info("a pod gets a worker for itself", "pod", p.ID, "why", why)
	return b.setPod(podState{ID: p.ID, Scope: ownScope(p.ID), Apart: why})
}

// StopSandbox implements sandbox.Backend. Without its container a sandbox has nothing that lives but the worker that it
// may have for itself, in the cgroup that a kubelet is about to remove.
func (b *Backend) StopSandbox(ctx context.Context, p *sandbox.Pod) error {
	if scope := b.scopeOf(p); isOwn(scope) {
		return b.endWorkers(ctx, scope)
	}
	return nil
}

// endWorkers ends the workers of a scope.
func (b *Backend) endWorkers(ctx context.Context, scope string) error {
	var errs []error
	for _, w := range b.keeper.all() {
		if w.scope == scope && (isOwn(scope) || !b.busy(w)) {
			errs = append(errs, w.end(ctx))
		}
	}
	return errors.Join(errs...)
}

// RemoveSandbox implements sandbox.Backend.
func (b *Backend) RemoveSandbox(ctx context.Context, p *sandbox.Pod) error {
	return b.removeSandbox(ctx, p.ID)
}

func (b *Backend) removeSandbox(ctx context.Context, id string) error {
	if err := b.removeContainer(ctx, id); err != nil {
		return err
	}
	if err := os.RemoveAll(b.cfg.podDir(id)); err != nil {
		return fmt.Errorf("wasm pod: %w", err)
	}
	if err := fpSandboxRemoved.Hit(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	scope := b.sandboxes[id].Scope
	delete(b.sandboxes, id)
	b.mu.Unlock()
	b.sampler.Forget(id)
	b.sampler.Forget("pod " + id)
	return b.endIdle(ctx, scope)
}

// endIdle ends the workers of a scope without pods. The worker of the node stays for the next pod.
func (b *Backend) endIdle(ctx context.Context, scope string) error {
	if scope == "" || b.hasPods(scope) {
		return nil
	}
	if scope == scopeNode && b.cfg.Workers == WorkerPerNode {
		return b.keeper.endRetired(ctx)
	}
	return b.endWorkers(ctx, scope)
}

// hasPods reports whether a scope has pods.
func (b *Backend) hasPods(scope string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.sandboxes {
		if s.Scope == scope {
			return true
		}
	}
	return false
}

// busy reports whether a worker must outlive the daemon: its scope has pods, or it runs a pod of another scope, which
// started before the configuration changed.
func (b *Backend) busy(w *worker) bool {
	if b.hasPods(w.scope) {
		return true
	}
	return slices.ContainsFunc(b.ledger.All(), func(h *handle) bool {
		_, l := h.Snapshot()
		return l != nil && l.worker == w
	})
}
