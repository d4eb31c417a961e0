package wasm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/certificates"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
	"github.com/tripod-run/tripod/internal/stats"
)

// Config configures the backend.
type Config struct {
	// Root holds compiled code and the node's certificate authority, and must survive a reboot. RunDir holds the pods'
	// files and the workers' sockets, and must not survive a reboot.
	Root, RunDir string
	// Program is the path of tripod-wasm. If it is empty, Open looks for tripod-wasm beside the executable of this
	// process and in PATH.
	Program string
	// Workers says which pods share a worker process; WorkerPerNode by default.
	Workers WorkerMode
	// UID and GID are the user and group of workers and compilers.
	UID, GID int
	// CgroupDriver is "cgroupfs" or "systemd". CgroupParent is a path (cgroupfs) or the name of a slice (systemd). It
	// is the parent cgroup of shared workers, and of a pod's own worker if the pod names no parent.
	CgroupDriver, CgroupParent string
	// LabelPrefix is the prefix of the labels that name a component, and of the annotations of package annotations.
	LabelPrefix string
	// Annotations are those that pods may use.
	Annotations sandbox.AllowList
	// LogSizeMax bounds the log file of a container, in bytes; 0 means no limit.
	LogSizeMax int64
	// Instances is the size of a worker's pool of guest instances. MaxMemory bounds the size of each linear memory, in
	// bytes. 0 means the worker's default.
	Instances int
	MaxMemory uint64
	// Connections limits the connections of each pod.
	Connections connlimit.Config
	// Holdings limit the resources that the guests of one pod hold in their worker. Concurrency limits the value of a
	// pod's concurrency annotation. 0 means no limit.
	Holdings    Holdings
	Concurrency int
	// Pairs bound the store that the node keeps for each namespace.
	Pairs Pairs
	// Origins are the web pages that can call pods without an annotation of their own, as patterns of package origin.
	Origins []string
	// CompileTimeout and CompileMemory (bytes) bound the compilation of one component. CompileParallel bounds the number
	// of concurrent ones; 0 means a number that suits the host's processors and memory.
	CompileTimeout  time.Duration
	CompileMemory   int64
	CompileParallel int
	// QuickCode lets pods with a large component begin with quick code, unless they demand optimised code.
	QuickCode bool
	// CompiledLayers say which compiled code in images is used.
	CompiledLayers []CompiledLayers
	// LogLevel is the workers' slog level.
	LogLevel string

	// quickAbove is code.Config.QuickAbove, or 0 for its usual value.
	quickAbove int64
}

// CompiledLayers is a rule of the policy for compiled code in images.
type CompiledLayers = code.Rule

// Holdings limit the resources that the guests of one pod hold in their worker.
type Holdings = workerapi.Holdings

// Services are the parts of the node that the backend uses.
type Services struct {
	// Images provides components, and Network opens sockets.
	Images  ImageStore
	Network Network
	// Spans gets the spans of the workers' requests (a serialized OTLP ExportTraceServiceRequest); nil disables spans.
	Spans func(otlp []byte)
	// Logger gets errors that cannot be returned to a caller; nil discards them.
	Logger *slog.Logger
}

// setup is the configuration and the services that the parts of the backend share.
type setup struct {
	Config
	Services
}

// ImageStore is the part of the image service that the backend uses. Images implements it.
type ImageStore interface {
	code.Images
	// List returns all images. Changes returns a channel that receives a value when the list has changed.
	List(ctx context.Context) ([]image.Image, error)
	Changes() <-chan struct{}
}

// Images adapts the node's image store to ImageStore.
type Images struct{ *image.Store }

// Component implements ImageStore.
func (i Images) Component(ctx context.Context, imageID string) (*artifact.Artifact, error) {
	return artifact.Open(ctx, i.Store, imageID)
}

// ImportFile imports a binary from a file on this node as an image; see artifact.ImportFile.
func (i Images) ImportFile(ctx context.Context, file *os.File) (image.Image, error) {
	return artifact.ImportFile(ctx, i.Store, file)
}

// ImportModule imports a binary as an image; see artifact.Import.
func (i Images) ImportModule(ctx context.Context, wasm io.Reader) (image.Image, error) {
	return artifact.Import(ctx, i.Store, wasm)
}

// Network opens sockets in the pods' network namespaces, or in the node's if the given netns is empty. *network.Manager
// implements it.
type Network interface {
	Listen(ctx context.Context, netns, network, addr string) (*os.File, error)
}

// Backend is the sandbox.Backend for component pods. Use Open.
type Backend struct {
	cfg         setup
	cgroups     cgroup.Tree
	log         *slog.Logger
	cache       *code.Cache
	precompiler *code.Precompiler
	keeper      *workers.Keeper
	dialers     *workers.Dialers
	catalog     *code.Catalog
	tls         *certificates.Authority
	watcher     *certificates.Watcher
	sampler     *stats.Sampler
	figures     figures
	// sweeping counts the background tasks, which end when stop cancels background.
	sweeping   sync.WaitGroup
	background context.Context
	stop       context.CancelFunc
	// recovered is closed when Recover has succeeded.
	recovered     chan struct{}
	recoveredOnce sync.Once
	// listed is set once the components of the stored images are known.
	listed atomic.Bool
	// dialerLost wakes followDialers.
	dialerLost chan struct{}

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
const ProgramName = launch.Name

// programEnv is added to the environment of tripod-wasm. Only tests set it.
var programEnv []string

func (c Config) program() launch.Program {
	return launch.Program{Path: c.Program, UID: c.UID, GID: c.GID, Env: programEnv}
}

// code returns the part of the configuration for compiled code.
func (c setup) code() code.Config {
	return code.Config{
		Dir: c.cacheDir(), Program: c.program(), Timeout: c.CompileTimeout, Memory: c.CompileMemory, Parallel: c.CompileParallel,
		Quick: c.QuickCode, QuickAbove: c.quickAbove, Rules: c.CompiledLayers, Images: c.Images, Logger: c.Logger,
	}
}

// workers returns the part of the configuration for workers and dialers.
func (c setup) workers(tree cgroup.Tree) workers.Config {
	return workers.Config{
		Program: c.program(), Dir: c.workersDir(), DialersDir: c.dialersDir(), Cgroups: tree, Instances: c.Instances, MaxMemory: c.MaxMemory,
		Connections: c.Connections, LogLevel: c.LogLevel, LogSizeMax: c.LogSizeMax, Spans: c.Spans, Logger: c.Logger,
	}
}

// Open opens the backend and creates its directories. It returns errdefs.ErrNotFound if the configuration names no
// program and none is found. Workers start when pods need them. The backend outlives the context.
func Open(_ context.Context, c Config, s Services) (_ *Backend, err error) {
	cfg := setup{c.withDefaults(), s}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Program, err = launch.Find(cfg.Program); err != nil {
		return nil, err
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	for _, dir := range []string{cfg.Root, cfg.RunDir, cfg.podsDir(), cfg.workersDir(), cfg.dialersDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil && !sandbox.ReadOnlyDisk(err) {
			return nil, fmt.Errorf("wasm backend: %w", err)
		}
	}
	watcher, err := certificates.NewWatcher(cfg.Logger)
	if err != nil {
		return nil, fmt.Errorf("wasm backend: %w", err)
	}
	tree, err := cgroup.Open(cfg.CgroupDriver, cfg.CgroupParent)
	if err != nil {
		watcher.Close()
		return nil, fmt.Errorf("wasm backend: %w", err)
	}
	keeper := workers.NewKeeper(cfg.workers(tree))
	background, stop := context.WithCancel(context.Background())
	b := &Backend{
		cfg: cfg, log: cfg.Logger, cgroups: tree, cache: code.New(background, cfg.code()), keeper: keeper, dialers: workers.NewDialers(keeper),
		catalog: code.NewCatalog(cfg.Images),
		tls:     certificates.NewAuthority(cfg.Root), watcher: watcher, sampler: stats.NewSampler(8192),
		ledger:     ledger.New[state, life](format, func(_, id string) string { return cfg.containerFile(id) }, cfg.Logger),
		sandboxes:  map[string]podState{},
		background: background, stop: stop, recovered: make(chan struct{}), dialerLost: make(chan struct{}, 1),
	}
	b.cache.Improved = func() { go guard.Func(b.log, "optimised code", b.improve)() }
	b.precompiler = code.NewPrecompiler(b.cache, b.catalog, func(c sandbox.Compilation) { b.ledger.Report(sandbox.Event{Compilation: &c}) })
	b.keeper.Exited, b.keeper.FellBack, b.keeper.Died, b.keeper.Reconnected = b.podExited, b.podFellBack, b.workerDied, b.resync
	b.keeper.HasPods = b.hasPods
	b.watcher.Changed, b.dialers.Died = b.certificateChanged, b.reconnectSoon
	b.sweeping.Go(guard.Loop(b.log, "wasm upkeep", func() { b.upkeep(b.background) }))
	b.sweeping.Go(guard.Loop(b.log, "wasm dialers", func() { b.followDialers(b.background) }))
	b.sweeping.Go(guard.Loop(b.log, "wasm compilations", func() { b.followImages(b.background) }))
	return b, nil
}

// closeTime bounds how long Close waits for workers to end.
const closeTime = 10 * time.Second

// Close ends the compilations, and the workers and dialers that have no pods. The others continue to run.
func (b *Backend) Close() error {
	b.stop()
	b.sweeping.Wait()
	b.precompiler.Wait()
	b.cache.Wait()
	b.watcher.Close()
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	err := b.keeper.Close(ctx, b.busy)
	b.dialers.Close(b.usesDialer)
	return err
}

func (c Config) withDefaults() Config {
	c.Workers = cmp.Or(c.Workers, WorkerPerNode)
	c.CgroupDriver, c.CgroupParent = cgroup.Defaults(c.CgroupDriver, c.CgroupParent)
	c.LabelPrefix = cmp.Or(c.LabelPrefix, keys.Components)
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
		return fmt.Errorf("wasm backend: worker mode %q is not node, namespace or pod: %w", c.Workers, errdefs.ErrInvalidArgument)
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
	return sandbox.Capabilities{MaxContainers: 1, Components: true, ForeignPods: true, HostNetwork: true, UserNamespaces: true}
}

// CreateSandbox implements sandbox.Backend. If the pod needs a shared worker that is not running, CreateSandbox also
// starts that worker, in the background.
func (b *Backend) CreateSandbox(ctx context.Context, p *sandbox.Pod) error {
	s := podState{ID: p.ID, Scope: b.cfg.scopeOf(p)}
	if err := os.MkdirAll(b.cfg.podDir(p.ID), 0o700); err != nil {
		return sandbox.DiskError(fmt.Errorf("wasm pod: %w", err))
	}
	if err := b.setPod(s); err != nil {
		return err
	}
	if !workers.IsOwn(s.Scope) {
		if err := b.cgroups.KeepControllers(p.Config.GetLinux().GetCgroupParent()); err != nil {
			return fmt.Errorf("wasm pod: %w", err)
		}
		if b.keeper.Current(s.Scope) == nil {
			b.keeper.Prestart(s.Scope)
		}
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

// scopeOf returns the scope of the worker that will run a pod's container. A foreign container has a worker
// of its own.
func (b *Backend) scopeOf(p *sandbox.Pod, c *sandbox.Container) string {
	if sandbox.IsForeign(p, c) {
		return ownScope(c.ID)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if scope := b.sandboxes[p.ID].Scope; workers.IsOwn(scope) {
		return scope
	}
	return b.cfg.scopeOf(p)
}

// assignOwnWorker gives a pod its own worker, whatever the worker mode, until the sandbox is removed.
func (b *Backend) assignOwnWorker(p *sandbox.Pod, why string) error {
	b.log.Info("pod needs its own worker", "pod", p.ID, "why", why)
	return b.setPod(podState{ID: p.ID, Scope: ownScope(p.ID), OwnWorkerReason: why})
}

// StopSandbox implements sandbox.Backend. It ends the sandbox's own worker, if it has one, because a kubelet is about
// to remove the cgroup that contains the worker.
func (b *Backend) StopSandbox(ctx context.Context, p *sandbox.Pod) error {
	if scope := b.scopeOf(p, nil); workers.IsOwn(scope) {
		return b.endWorkers(ctx, scope)
	}
	return nil
}

// endWorkers ends the workers of a scope, except shared workers that are busy.
func (b *Backend) endWorkers(ctx context.Context, scope string) error {
	var errs []error
	for _, w := range b.keeper.All() {
		if w.Scope == scope && (workers.IsOwn(scope) || !b.busy(w)) {
			errs = append(errs, w.End(ctx))
		}
	}
	return errors.Join(errs...)
}

// RemoveSandbox implements sandbox.Backend.
func (b *Backend) RemoveSandbox(ctx context.Context, p *sandbox.Pod) error {
	if err := b.removeContainer(ctx, p.ID); err != nil {
		return err
	}
	if err := os.RemoveAll(b.cfg.podDir(p.ID)); err != nil {
		return fmt.Errorf("wasm pod: %w", err)
	}
	if err := fpSandboxRemoved.Hit(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	scope := b.sandboxes[p.ID].Scope
	delete(b.sandboxes, p.ID)
	b.mu.Unlock()
	b.sampler.Forget(p.ID)
	b.sampler.Forget("pod " + p.ID)
	if err := b.endIdle(ctx, scope); err != nil {
		return err
	}
	slice, _ := b.cgroups.Pod(p.Config.GetLinux().GetCgroupParent(), workers.SlicePrefix+p.ID)
	return b.cgroups.RemoveSlice(ctx, workers.SlicePrefix+p.ID, slice)
}

// endIdle ends the workers of a scope if the scope has no pods. The node's current worker continues to run, for the
// next pod.
func (b *Backend) endIdle(ctx context.Context, scope string) error {
	if scope == "" || b.hasPods(scope) {
		return nil
	}
	if scope == scopeNode && b.cfg.Workers == WorkerPerNode {
		return b.keeper.EndRetired(ctx)
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

// busy reports whether a worker must outlive the daemon. A worker is busy if its scope has pods, or if it runs a pod
// that was started before the worker mode changed.
func (b *Backend) busy(w *workers.Worker) bool {
	if b.hasPods(w.Scope) {
		return true
	}
	return slices.ContainsFunc(b.ledger.All(), func(h *handle) bool {
		_, l := h.Snapshot()
		return l != nil && l.worker == w
	})
}
