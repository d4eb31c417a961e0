package linux

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/apparmor"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/notifier"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
	"github.com/tripod-run/tripod/internal/stats"
)

// Config configures the backend.
type Config struct {
	// Root is the directory of the containers' bundles. It must survive a reboot. RunDir is the directory of pins,
	// sockets and other things that must not survive a reboot.
	Root, RunDir string
	// Runtime is the OCI runtime: "auto" (crun if it works on this host, otherwise runc), "crun", "runc" or a path.
	Runtime string
	// Conmon and Catatonit are the paths of these programs. If a path is empty, the program is looked up in PATH. Only
	// pods whose containers share a PID namespace need catatonit.
	Conmon, Catatonit string
	// CgroupDriver is "cgroupfs" or "systemd"; it must match the kubelet's.
	CgroupDriver string
	// CgroupParent is the default parent of pods: a path (cgroupfs) or a slice (systemd).
	CgroupParent string
	// LogSizeMax is the size limit of a container's log file in bytes; 0 means no limit.
	LogSizeMax int64
	// CDIDirs are the directories of the files that describe CDI devices.
	CDIDirs []string
	// Annotations are those that pods may use.
	Annotations sandbox.AllowList
	// Tried are the results of trials that Open need not repeat, because the kernel and the programs are always the same. Open
	// tries a runtime with another version. It does not run conmon if there are any.
	Tried []oci.Tried
	// ExecStarts is how many programs Exec starts at the same time; 0: no limit. A program that its caller gives up is started
	// and then killed, so those of frequent probes would pile up where a start takes longer than the probes wait.
	ExecStarts int
	// NoUserNamespaces refuses pods with user namespaces, without a trial.
	NoUserNamespaces bool
}

// DebianCrun is what the trial of Debian 12's crun shows, for Config.Tried.
var DebianCrun = []oci.Tried{{Version: "crun version 1.8.1", RecursiveReadOnly: true, Releases: true}}

// Services are the parts of the node that the backend uses.
type Services struct {
	// Images provides root file systems.
	Images ImageStore
	// Logger receives errors that no caller sees; nil discards them.
	Logger *slog.Logger
}

// ImageStore is the part of the image service that the backend uses; *image.Store implements it. A key names a
// snapshot: the backend's keys are "linux-<container>" and "linux-<container>-volume-<n>". Methods return
// errdefs.ErrNotFound if the image or snapshot does not exist.
type ImageStore interface {
	// Get finds an image by ID or reference.
	Get(ctx context.Context, refOrID string) (image.Image, error)
	// Prepare creates a writable snapshot of an image, unless a snapshot with this key exists. It returns the
	// snapshot's mounts.
	Prepare(ctx context.Context, key, imageID string, labels map[string]string) ([]mount.Mount, error)
	// View is like Prepare, but for a read-only snapshot.
	View(ctx context.Context, key, imageID string) ([]mount.Mount, error)
	// Mounts returns the mounts of an existing snapshot.
	Mounts(ctx context.Context, key string) ([]mount.Mount, error)
	// Release removes an unmounted snapshot. It succeeds if the snapshot does not exist.
	Release(ctx context.Context, key string) error
	// Snapshots lists the keys of all snapshots, including those of the store's other users.
	Snapshots(ctx context.Context) ([]string, error)
	// Usage returns the last measured disk usage of a snapshot's own layer, which can be seconds old.
	Usage(ctx context.Context, key string) (image.Usage, error)
}

// Backend runs pods as OCI containers. Use Open.
type Backend struct {
	cfg     Config
	images  ImageStore
	log     *slog.Logger
	host    spec.Host
	runtime oci.Runtime
	conmon  oci.Monitor
	cgroups cgroups
	joins   *oci.Joins
	sampler *stats.Sampler
	// volatile means that containers' layers are mounted with the option "volatile".
	volatile bool
	// labels assigns SELinux labels. It is nil if the node has no SELinux.
	labels *selinux.Pool
	// notifier reports the calls that containers' seccomp profiles forbid.
	notifier  *notifier.Listener
	forbidden *forbiddenCalls
	// users repeats the trial of user namespaces.
	users *oci.UsersTrial

	ledger *ledger.Ledger[state, life]
	// sessions serves the sessions in the daemon: calls of ExecSync, and what another process cannot serve.
	sessions *Sessions

	mu     sync.Mutex
	pauses map[string]*process.Process
}

var (
	_ sandbox.Backend       = (*Backend)(nil)
	_ sandbox.Execer        = (*Backend)(nil)
	_ sandbox.Attacher      = (*Backend)(nil)
	_ sandbox.LogReopener   = (*Backend)(nil)
	_ sandbox.Updater       = (*Backend)(nil)
	_ sandbox.PodUpdater    = (*Backend)(nil)
	_ sandbox.Specifier     = (*Backend)(nil)
	_ sandbox.StatsProvider = (*Backend)(nil)
	_ sandbox.Inspector     = (*Backend)(nil)
	_ sandbox.NetnsMaker    = (*Backend)(nil)
	_ ImageStore            = (*image.Store)(nil)

	_ sandbox.SessionPlanner = (*Backend)(nil)
	_ sandbox.SessionReaper  = (*Backend)(nil)
	_ sandbox.SessionServer  = (*Sessions)(nil)
)

// Open finds the helper programs, checks the OCI runtime with a trial container, and creates the directories. Its error
// names the first missing program and how to install it; Doctor reports all missing programs. The error is
// errdefs.ErrNotFound if the programs are not installed, the configuration names none of them, and no pods need them. The
// context bounds only this call.
func Open(ctx context.Context, c Config, s Services) (*Backend, error) {
	cfg := c.withDefaults()
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := cfg.installed(); err != nil {
		return nil, err
	}
	host, err := spec.Probe()
	if err != nil {
		return nil, fmt.Errorf("probe the host: %w", err)
	}
	groups, err := openCgroups(cfg.CgroupDriver, cfg.CgroupParent)
	if err != nil {
		return nil, err
	}
	if err := cfg.makeDirs(); err != nil {
		return nil, fmt.Errorf("linux backend: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	profile := make(chan string, 1)
	go guard.Func(s.Logger, "the default AppArmor profile", func() {
		defer close(profile)
		profile <- apparmor.Setup(ctx, host.AppArmor, s.Logger)
	})()
	rt, err := oci.FindRuntime(ctx, cfg.oci(), groups.Tree)
	host.AppArmorProfile = <-profile
	if err != nil {
		return nil, err
	}
	labels := selinux.Open(s.Logger)
	host.SELinux = labels != nil
	host.Runtime = rt.Features
	host.RecursiveReadOnly = host.RecursiveReadOnly && rt.RecursiveReadOnly
	conmon, err := oci.OpenMonitor(ctx, cfg.oci(), groups.Tree)
	if err != nil {
		rt.Close()
		return nil, err
	}
	noVolatile := mnt.ProbeVolatile(cfg.Root)
	if noVolatile != nil {
		s.Logger.Warn("removing a container waits for all pending writes of its file system", "err", noVolatile,
			"reason", "overlays cannot be mounted with \"volatile\" (Linux 5.10)")
	}
	s.Logger.Info("linux backend", "runtime", rt.Path, "version", rt.Version, "conmon", conmon.Path,
		"cgroup_v2", groups.V2, "recursive_read_only", host.RecursiveReadOnly, "user_namespaces", rt.UserNamespaces == nil)
	b := &Backend{
		cfg: cfg, images: s.Images, log: s.Logger, host: host, runtime: rt, conmon: conmon, cgroups: groups, joins: oci.NewJoins(groups.Tree),
		sampler: stats.NewSampler(8192), volatile: noVolatile == nil, labels: labels,
		ledger:   ledger.New[state, life](format, cfg.stateFile, s.Logger),
		sessions: newSessions(s.Logger, conmon.Spawner, cfg.ExecStarts), pauses: map[string]*process.Process{},
		forbidden: newForbiddenCalls(), users: oci.NewUsersTrial(rt.UserNamespaces),
	}
	if b.notifier, err = notifier.Listen(cfg.notifierSocket(), b.reportForbidden, s.Logger); err != nil {
		s.Logger.Warn("containers cannot have a seccomp notifier", "err", err)
	}
	if !cfg.NoUserNamespaces {
		b.users.Begin(s.Logger, func(ctx context.Context) error { return rt.ProbeUserNamespace(ctx, cfg.oci(), groups.Tree) })
	}
	return b, nil
}

// Close releases what Open acquired. Containers keep running; the backend must not be used afterwards.
func (b *Backend) Close() error {
	b.users.End()
	if b.notifier != nil {
		_ = b.notifier.Close()
	}
	b.runtime.Close()
	return b.sessions.Close()
}

func (c Config) withDefaults() Config {
	if c.Runtime == "" {
		c.Runtime = "auto"
	}
	c.CgroupDriver, c.CgroupParent = cgroup.Defaults(c.CgroupDriver, c.CgroupParent)
	return c
}

func (c Config) check() error {
	for name, path := range map[string]string{"Root": c.Root, "RunDir": c.RunDir} {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return fmt.Errorf("linux backend: %s %q is not an absolute, clean path: %w", name, path, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// makeDirs makes the backend's directories. The roots of user namespaces pass through some of them to those of their
// pods, but cannot read them.
func (c Config) makeDirs() error {
	for _, dir := range []string{c.Root, c.RunDir, c.podsDir(), c.exitDir(), c.ociDir(), c.execDir(), filepath.Dir(c.notifierSocket())} {
		if err := os.MkdirAll(dir, 0o700); err != nil && !errors.Is(err, unix.EROFS) { // existing containers work even on a read-only disk
			return err
		}
	}
	return errors.Join(os.Chmod(c.RunDir, 0o711), os.Chmod(c.podsDir(), 0o711))
}

// All paths derive from the configuration and the IDs.

// notifierSocket is in a directory of its own, because others can enter RunDir (see makeDirs).
func (c Config) notifierSocket() string { return filepath.Join(c.RunDir, "seccomp", "notify.sock") }

func (c Config) exitDir() string { return filepath.Join(c.RunDir, "exits") }
func (c Config) ociDir() string  { return filepath.Join(c.RunDir, "oci") }
func (c Config) execDir() string { return filepath.Join(c.RunDir, "exec") }
func (c Config) podsDir() string { return filepath.Join(c.RunDir, "pods") }

func (c Config) podDir(pod string) string            { return filepath.Join(c.Root, pod) }
func (c Config) podRunDir(pod string) string         { return filepath.Join(c.podsDir(), pod) }
func (c Config) bundle(pod, container string) string { return filepath.Join(c.Root, pod, container) }
func (c Config) stateFile(pod, container string) string {
	return filepath.Join(c.bundle(pod, container), "state.json")
}

// snapshotPrefix is the prefix of our snapshots' keys.
const snapshotPrefix = "linux-"

func (b *Backend) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{
		HostNetwork:              true,
		RecursiveReadOnlyMounts:  b.host.RecursiveReadOnly,
		MountOptions:             true,
		SupplementalGroupsPolicy: true,
		UserNamespaces:           b.users.Reason() == nil,
		MapsIDs:                  true,
	}
}

// hostNow returns what the host can do, as far as that changes.
func (b *Backend) hostNow() spec.Host {
	host := b.host
	host.UserNamespaces = b.users.Reason()
	return host
}

func (b *Backend) Validate(p *sandbox.Pod, c *sandbox.Container) error {
	if !cgroup.ID().MatchString(p.ID) {
		return fmt.Errorf("pod ID %q is not 64 lower-case hex digits: %w", p.ID, errdefs.ErrInvalidArgument)
	}
	if err := spec.Validate(p, c, b.hostNow()); err != nil {
		return err
	}
	if err := errors.Join(b.cfg.Annotations.Check(p, c), b.validateNotifier(p, c)); err != nil {
		return err
	}
	if c == nil {
		return b.validatePod(p)
	}
	if !cgroup.ID().MatchString(c.ID) {
		return fmt.Errorf("container ID %q is not 64 lower-case hex digits: %w", c.ID, errdefs.ErrInvalidArgument)
	}
	_, err := logPath(p, c)
	return err
}

func (b *Backend) validatePod(p *sandbox.Pod) error {
	if shared.SharesPID(p) && b.cfg.catatonit() == "" {
		return fmt.Errorf("a PID namespace shared by the pod's containers needs catatonit, which is not installed "+
			"(Debian: apt-get install catatonit): %w", errdefs.ErrNotImplemented)
	}
	if spec.PodModes(p).IPC == runtimeapi.NamespaceMode_CONTAINER {
		for name := range p.Config.GetLinux().GetSysctls() {
			if !strings.HasPrefix(name, "net") {
				return fmt.Errorf("linux.sysctls: %q belongs to an IPC namespace, which the pod's containers do not share "+
					"(namespace_options.ipc is CONTAINER): %w", name, errdefs.ErrInvalidArgument)
			}
		}
	}
	return b.cgroups.ValidParent(p.Config.GetLinux().GetCgroupParent())
}

// installed returns errdefs.ErrNotFound if a program that the backend needs is not in PATH, and errdefs.ErrUnavailable if the
// node then has pods that need it: the program may be about to come back.
func (c Config) installed() error {
	missing := c.oci().Missing()
	if missing == "" {
		return nil
	}
	if pods := idsIn(c.Root); len(pods) > 0 {
		return fmt.Errorf("%s, but %d pods of this node need it: %w", missing, len(pods), errdefs.ErrUnavailable)
	}
	return fmt.Errorf("%s: %w", missing, errdefs.ErrNotFound)
}

// oci returns the part of the configuration that is about the OCI runtime and conmon.
func (c Config) oci() oci.Config {
	return oci.Config{
		Runtime: c.Runtime, Conmon: c.Conmon, Bundles: c.Root, RunDir: c.RunDir, StateDir: c.ociDir(), ExitDir: c.exitDir(),
		LogSizeMax: c.LogSizeMax, Tried: c.Tried, NoUserNamespaces: c.NoUserNamespaces,
	}
}
