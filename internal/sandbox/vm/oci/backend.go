package oci

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
	"github.com/tripod-run/tripod/internal/stats"
)

var (
	fpShared = failpoint.New("vm-oci.create-sandbox.shared")
	fpBooted = failpoint.New("vm-oci.create-sandbox.booted")
	fpMade   = failpoint.New("vm-oci.create-sandbox.made")
	fpKilled = failpoint.New("vm-oci.stop-sandbox.killed")
	fpFreed  = failpoint.New("vm-oci.stop-sandbox.released")
)

const (
	// scratchSize is the size in bytes of the disk for the containers' writable layers and unread logs. It takes room as it
	// fills.
	scratchSize = 10 << 30
	// setupTime bounds the boot of a guest and its preparation for the pod.
	setupTime = 3 * time.Minute
	// syncTime bounds the writing of the volumes' contents before a machine is killed.
	syncTime = 5 * time.Second
)

// Backend is the sandbox.Backend for pods whose OCI containers run in a machine of the pod's own (handler "vm-oci").
//
//	Backend ── a pod ─────▶ vm.Backend: a machine with our kernel, one per pod
//	 │  ── an image ──────▶ Images.OpenRootDisk ──▶ machine.Driver.Plug: a read-only disk
//	 │  ── a volume ──────▶ a bind mount below the pod's share
//	 └──── a container ═══▶ tripod-guest in the machine (guestapi) ──▶ the backend for Linux containers, crun, conmon
//
// The machine is a unit pod of vm.Backend, whose single container has the pod's ID. The ledger has the containers as the
// node knows them: what the guest says about a container is recorded here, and stays when the machine has ended.
type Backend struct {
	cfg      vm.Config
	machines machines
	images   Images
	// annotations are those that pods may use.
	annotations sandbox.AllowList
	log         *slog.Logger
	ledger      *ledger.Ledger[state, life]
	templates   *templates.Set
	figures     figures
	sampler     *stats.Sampler
	// tasks end when ctx does, which Close ends.
	tasks sync.WaitGroup
	ctx   context.Context
	close context.CancelFunc
	// guestOf returns the connection to the guest of a pod. Tests replace it.
	guestOf func(pod string) (guestAgent, error)

	mu   sync.Mutex
	pods map[string]*podMachine
}

// Images is the part of the image service that the backend uses; *image.Store implements it.
type Images interface {
	// Get finds an image by ID or reference.
	Get(ctx context.Context, refOrID string) (image.Image, error)
	// OpenRootDisk opens the disk with an image's root file system, and leases the image under the key until CloseDisk.
	OpenRootDisk(ctx context.Context, key, imageID string) (*os.File, error)
	CloseDisk(ctx context.Context, key string) error
	// Disks returns the keys of all leases, including those of other users.
	Disks(ctx context.Context) ([]string, error)
}

var (
	_ sandbox.Backend       = (*Backend)(nil)
	_ sandbox.Execer        = (*Backend)(nil)
	_ sandbox.Attacher      = (*Backend)(nil)
	_ sandbox.Dialer        = (*Backend)(nil)
	_ sandbox.LogReopener   = (*Backend)(nil)
	_ sandbox.Updater       = (*Backend)(nil)
	_ sandbox.PodUpdater    = (*Backend)(nil)
	_ sandbox.StatsProvider = (*Backend)(nil)
	_ sandbox.Readier       = (*Backend)(nil)
	_ sandbox.Inspector     = (*Backend)(nil)
	_ Images                = (*image.Store)(nil)
)

// Open opens the backend. The directories of the configuration must not be those of vm.Open's. It returns
// errdefs.ErrNotFound if QEMU or the guest's files are missing, and errdefs.ErrNotImplemented if the driver is libvirt.
func Open(ctx context.Context, c vm.Config, images Images, log *slog.Logger) (*Backend, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if c.VM.Driver == vm.DriverLibvirt {
		return nil, fmt.Errorf("vm.driver %q cannot plug in the disks of images; set it to \"qmp\": %w", c.VM.Driver, errdefs.ErrNotImplemented)
	}
	files := guestFilesOf(c)
	if err := files.check(); err != nil {
		return nil, err
	}
	scratch, err := makeScratchBase(ctx, c.Root)
	if err != nil {
		return nil, err
	}
	allowed := c.Annotations
	c.Annotations = sandbox.AllowList{"*"} // the machines' pods are our own
	c.VM.UIDBase += c.VM.UIDCount          // the handler vm has those before
	o := &Backend{cfg: c, images: images, annotations: allowed, log: log, sampler: stats.NewSampler(8192), pods: map[string]*podMachine{}}
	o.machines, err = vm.OpenGuests(ctx, c, vm.Services{Images: files, Logger: log}, vm.Guests{
		Prefix: prefix, ScratchBase: scratch, Disk: files.disk(), Continue: o.useTemplate,
	})
	if err != nil {
		return nil, err
	}
	o.ctx, o.close = context.WithCancel(context.Background())
	o.ledger, o.guestOf = ledger.New[state, life](format, o.containerFile, log), o.agent
	o.templates = templates.New(o.machines, o.templateKind(), c.Root, c.VM, log)
	o.figures = newFigures(o.templates)
	o.templates.Start(o.ctx)
	return o, nil
}

// format is the version of the state files of containers.
const format ledger.Format = 1

// prefix begins the names of the machines' cgroups and the keys of the images' leases.
const prefix = "vmoci-"

// The paths of a pod, below that of its machine. The directory shared is the source of the machine's share.
func (o *Backend) dir(pod string) string       { return filepath.Join(o.cfg.RunDir, "oci", pod) }
func (o *Backend) sharedDir(pod string) string { return filepath.Join(o.dir(pod), "shared") }
func (o *Backend) disksFile(pod string) string { return filepath.Join(o.dir(pod), "disks.json") }
func (o *Backend) containerFile(pod, id string) string {
	return filepath.Join(o.cfg.Root, "oci", pod, id+".json")
}
func (o *Backend) cursorFile(pod, id string) string {
	return filepath.Join(o.cfg.Root, "oci", pod, id+".log.json")
}

// podMachine is a pod whose machine runs, or is being made.
type podMachine struct {
	pod *sandbox.Pod
	// watching is set when the pod's events are watched. stopping means that the end of the machine is no news.
	watching, stopping bool
	// boots is set when its machine did not continue from a template.
	boots bool

	sizing  sync.Mutex  // held while the machine gets another size
	size    machineSize // the size that it has got last
	cpus    sync.Mutex  // held while the machine gets its CPUs
	disks   sync.Mutex  // held while disks are plugged in, which can take as long as to make one
	volumes sync.Mutex  // held while volumes are mounted and unmounted

	sessions atomic.Int32 // see maxSessions

	layersMu sync.Mutex
	layers   map[string]layerUsage // of the running containers that the guest was asked about
	trimmed  time.Time             // when the guest was last told to give back the room of deleted files
}

// Close ends the connections to the guests. The machines keep running.
func (o *Backend) Close() error {
	o.templates.Close()
	o.ledger.ReportTo(nil)
	o.close()
	err := o.machines.Close()
	o.tasks.Wait()
	return err
}

// Capabilities implements sandbox.Backend.
func (o *Backend) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{RecursiveReadOnlyMounts: true, MountOptions: true, SupplementalGroupsPolicy: true}
}

// Ready implements sandbox.Readier.
func (o *Backend) Ready() error {
	if err := o.machines.Ready(); err != nil {
		return err
	}
	return checkTools(o.cfg)
}

// CreateSandbox implements sandbox.Backend. It boots the pod's machine and prepares the guest for the pod. It also completes
// a partly made pod.
func (o *Backend) CreateSandbox(ctx context.Context, p *sandbox.Pod) error {
	ctx, cancel := context.WithTimeoutCause(ctx, setupTime, fmt.Errorf("the pod's machine was not ready within %s", setupTime))
	defer cancel()
	if err := checkTools(o.cfg); err != nil {
		return fmt.Errorf("%w (%w)", err, errdefs.ErrFailedPrecondition)
	}
	began := time.Now()
	if err := o.makeShared(p.ID); err != nil {
		return fmt.Errorf("the pod's share: %w", err)
	}
	if err := fpShared.Hit(ctx); err != nil {
		return err
	}
	mp, mc := o.machine(p)
	if err := o.machines.CreateSandbox(ctx, mp); err != nil {
		return err
	}
	wired := time.Now()
	err := o.startMachine(ctx, p, mp, mc)
	if template := o.templateOf(p.ID); err != nil && template != "" && o.isTemplates(err) && ctx.Err() == nil {
		o.log.Warn("a machine cannot continue from its template and boots instead", "pod", p.ID, "template", template, "err", err)
		o.templates.Failed(template, began, errors.Is(err, machine.ErrRefused))
		o.mu.Lock()
		o.entry(p.ID).boots = true
		o.mu.Unlock()
		if err := o.machines.StopContainer(ctx, mp, mc, 0); err != nil {
			return err
		}
		err = o.startMachine(ctx, p, mp, mc)
	}
	if err != nil {
		return err
	}
	template := o.templateOf(p.ID)
	o.figures.started(template, time.Since(began))
	o.log.Info("a pod's machine is ready", "pod", p.ID, "template", template, "network", wired.Sub(began), "machine", time.Since(wired))
	pod := o.adopt(p)
	pod.sizing.Lock()
	pod.size = o.podSize(p)
	pod.sizing.Unlock()
	if template == "" {
		o.templates.Want(ctx, p, nil)
	} else {
		o.templates.Continued(template)
	}
	return fpMade.Hit(ctx)
}

// adopt begins to watch the pod's containers.
func (o *Backend) adopt(p *sandbox.Pod) *podMachine {
	o.mu.Lock()
	defer o.mu.Unlock()
	pod := o.entry(p.ID)
	pod.pod = p
	if !pod.watching {
		pod.watching, pod.stopping = true, false
		o.tasks.Go(guard.Func(o.log, "watch of a pod's machine", func() { o.watch(p) }))
	}
	return pod
}

// entry returns the pod, which it makes if necessary. The caller holds mu.
func (o *Backend) entry(id string) *podMachine {
	pod := o.pods[id]
	if pod == nil {
		pod = &podMachine{}
		o.pods[id] = pod
	}
	return pod
}

// unshare takes the volumes of a container away.
func (o *Backend) unshare(pod, id string) error {
	o.mu.Lock()
	p := o.entry(pod)
	o.mu.Unlock()
	p.volumes.Lock()
	defer p.volumes.Unlock()
	return o.unshareContainer(pod, id)
}

// running returns the pod, if its machine runs.
func (o *Backend) running(id string) (*podMachine, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if pod := o.pods[id]; pod != nil && pod.watching && !pod.stopping {
		return pod, nil
	}
	return nil, fmt.Errorf("the machine of pod %s is not running: %w", id, errdefs.ErrFailedPrecondition)
}

// stopping records that the pod's machine is about to be killed.
func (o *Backend) stopping(id string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if pod := o.pods[id]; pod != nil {
		pod.stopping = true
	}
}

// StopSandbox implements sandbox.Backend. The containers have already ended. StopSandbox kills the machine, after the guest
// has written the volumes' contents, and releases the volumes, the images and the network.
func (o *Backend) StopSandbox(ctx context.Context, p *sandbox.Pod) error {
	mp, mc := o.machine(p)
	if _, err := o.running(p.ID); err == nil {
		o.syncVolumes(ctx, p)
	}
	o.stopping(p.ID)
	if err := o.machines.StopContainer(ctx, mp, mc, 0); err != nil {
		return err
	}
	if err := fpKilled.Hit(ctx); err != nil {
		return err
	}
	if err := o.machines.StopSandbox(ctx, mp); err != nil {
		return err
	}
	if err := errors.Join(o.removeShared(p.ID), o.closeDisks(ctx, p.ID)); err != nil {
		return err
	}
	return fpFreed.Hit(ctx)
}

// syncVolumes lets the guest write what its pod's volumes contain, before its machine is killed.
func (o *Backend) syncVolumes(ctx context.Context, p *sandbox.Pod) {
	ctx, cancel := context.WithTimeout(ctx, syncTime)
	defer cancel()
	if err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodSync}, nil, nil); err != nil {
		o.log.Warn("a guest has not written all that its pod's volumes contain", "pod", p.ID, "err", err)
	}
}

// RemoveSandbox implements sandbox.Backend.
func (o *Backend) RemoveSandbox(ctx context.Context, p *sandbox.Pod) error {
	o.stopping(p.ID)
	mp, _ := o.machine(p)
	if err := o.machines.RemoveSandbox(ctx, mp); err != nil {
		return err
	}
	if err := o.removePod(ctx, p.ID); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.pods, p.ID)
	return nil
}

// removePod removes what belongs to a pod apart from its machine.
func (o *Backend) removePod(ctx context.Context, id string) error {
	if err := o.removeShared(id); err != nil { // before anything is deleted below a mount
		return err
	}
	return errors.Join(o.closeDisks(ctx, id), os.RemoveAll(o.dir(id)), os.RemoveAll(filepath.Dir(o.containerFile(id, ""))))
}

// PodStats implements sandbox.StatsProvider.
func (o *Backend) PodStats(ctx context.Context, p *sandbox.Pod) (*runtimeapi.LinuxPodSandboxStats, error) {
	mp, _ := o.machine(p)
	return o.machines.PodStats(ctx, mp)
}

// Inspect implements sandbox.Inspector. The facts of a pod are those of its machine.
func (o *Backend) Inspect(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (map[string]any, error) {
	if c != nil {
		return map[string]any{"sandboxID": p.ID}, nil
	}
	mp, mc := o.machine(p)
	v, err := o.machines.Inspect(ctx, mp, mc)
	if err == nil {
		err = o.templates.Inspect(ctx, p, v)
	}
	return v, err
}
