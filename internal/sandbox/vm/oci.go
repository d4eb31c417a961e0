package vm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
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
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var (
	fpOCIShared = failpoint.New("vm-oci.create-sandbox.shared")
	fpOCIBooted = failpoint.New("vm-oci.create-sandbox.booted")
	fpOCIMade   = failpoint.New("vm-oci.create-sandbox.made")
	fpOCIKilled = failpoint.New("vm-oci.stop-sandbox.killed")
	fpOCIFreed  = failpoint.New("vm-oci.stop-sandbox.released")
)

const (
	// guestOverhead is the memory in bytes that the guest's own kernel and programs need in addition to the containers'.
	guestOverhead = 192 << 20
	// scratchSize is the size in bytes of the disk for the containers' writable layers and unread logs. It takes room as it
	// fills.
	scratchSize = 10 << 30
	// setupTime bounds the boot of a guest and its preparation for the pod.
	setupTime = 3 * time.Minute
	// syncTime bounds the writing of the volumes' contents before a machine is killed.
	syncTime = 5 * time.Second
)

// OCI is the sandbox.Backend for pods whose OCI containers run in a machine of the pod's own (handler "vm-oci").
//
//	OCI ── a pod ─────────▶ Backend: a machine with our kernel, one per pod
//	 │  ── an image ──────▶ Images.OpenRootDisk ──▶ machine.Driver.Plug: a read-only disk
//	 │  ── a volume ──────▶ a bind mount below the pod's share
//	 └──── a container ═══▶ tripod-guest in the machine (guestapi) ──▶ the backend for Linux containers, crun, conmon
//
// The machine is a unit pod of the Backend, whose single container has the pod's ID. The ledger has the containers as the
// node knows them: what the guest says about a container is recorded here, and stays when the machine has ended.
type OCI struct {
	machines *Backend
	images   OCIImages
	// annotations are those that pods may use.
	annotations sandbox.AllowList
	log         *slog.Logger
	ledger      *ledger.Ledger[ociState, ociLife]
	templates   *templates
	figures     ociFigures
	tasks       sync.WaitGroup
	// guestOf returns the connection to the guest of a pod. Tests replace it.
	guestOf func(pod string) (guestAgent, error)

	mu   sync.Mutex
	pods map[string]*ociPod
}

// OCIImages is the part of the image service that OCI uses; *image.Store implements it.
type OCIImages interface {
	// Get finds an image by ID or reference.
	Get(ctx context.Context, refOrID string) (image.Image, error)
	// OpenRootDisk opens the disk with an image's root file system, and leases the image under the key until CloseDisk.
	OpenRootDisk(ctx context.Context, key, imageID string) (*os.File, error)
	CloseDisk(ctx context.Context, key string) error
	// Disks returns the keys of all leases, including those of other users.
	Disks(ctx context.Context) ([]string, error)
}

var (
	_ sandbox.Backend       = (*OCI)(nil)
	_ sandbox.Execer        = (*OCI)(nil)
	_ sandbox.Attacher      = (*OCI)(nil)
	_ sandbox.Dialer        = (*OCI)(nil)
	_ sandbox.LogReopener   = (*OCI)(nil)
	_ sandbox.Updater       = (*OCI)(nil)
	_ sandbox.PodUpdater    = (*OCI)(nil)
	_ sandbox.StatsProvider = (*OCI)(nil)
	_ sandbox.Readier       = (*OCI)(nil)
	_ sandbox.Inspector     = (*OCI)(nil)
	_ OCIImages             = (*image.Store)(nil)
)

// OpenOCI opens the backend. The directories of the configuration must not be those of Open's. It returns
// errdefs.ErrNotFound if QEMU or the guest's files are missing, and errdefs.ErrNotImplemented if the driver is libvirt.
func OpenOCI(ctx context.Context, c Config, images OCIImages, log *slog.Logger) (*OCI, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if c.VM.Driver == driverLibvirt {
		return nil, fmt.Errorf("vm.driver %q cannot plug in the disks of images; set it to \"qmp\": %w", c.VM.Driver, errdefs.ErrNotImplemented)
	}
	files := c.guestFiles()
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
	o := &OCI{images: images, annotations: allowed, log: log, pods: map[string]*ociPod{}}
	o.machines, err = open(ctx, c, Services{Images: files, Logger: log}, func(s *settings) {
		s.Prefix, s.Plug, s.ScratchBase, s.GuestDisk, s.AgentDisk = ociPrefix, true, scratch, files.disk(), ""
		s.Continue = o.useTemplate
	})
	if err != nil {
		return nil, err
	}
	o.ledger, o.guestOf = ledger.New[ociState, ociLife](format, o.containerFile, log), o.agent
	o.templates = newTemplates(o.machines, o.templateKind(), c, log)
	o.figures = newOCIFigures(o.templates)
	o.templates.start(o.machines.ctx)
	return o, nil
}

// ociPrefix begins the names of the machines' cgroups and the keys of the images' leases.
const ociPrefix = "vmoci-"

// The paths of a pod, below that of its machine. The directory shared is the source of the machine's share.
func (o *OCI) dir(pod string) string       { return filepath.Join(o.machines.cfg.RunDir, "oci", pod) }
func (o *OCI) sharedDir(pod string) string { return filepath.Join(o.dir(pod), "shared") }
func (o *OCI) disksFile(pod string) string { return filepath.Join(o.dir(pod), "disks.json") }
func (o *OCI) containerFile(pod, id string) string {
	return filepath.Join(o.machines.cfg.Root, "oci", pod, id+".json")
}
func (o *OCI) cursorFile(pod, id string) string {
	return filepath.Join(o.machines.cfg.Root, "oci", pod, id+".log.json")
}

// ociPod is a pod whose machine runs, or is being made.
type ociPod struct {
	pod *sandbox.Pod
	// watching is set when the pod's events are watched. stopping means that the end of the machine is no news.
	watching, stopping bool
	// boots is set when its machine did not continue from a template.
	boots bool

	sizing  sync.Mutex // held while the machine gets another size
	size    ociSize    // the size that it has got last
	cpus    sync.Mutex // held while the machine gets its CPUs
	disks   sync.Mutex // held while disks are plugged in, which can take as long as to make one
	volumes sync.Mutex // held while volumes are mounted and unmounted

	sessions atomic.Int32 // see maxSessions

	layersMu sync.Mutex
	layers   map[string]ociLayer // of the running containers that the guest was asked about
	trimmed  time.Time           // when the guest was last told to give back the room of deleted files
}

// Close ends the connections to the guests. The machines keep running.
func (o *OCI) Close() error {
	o.templates.close()
	o.ledger.ReportTo(nil)
	err := o.machines.Close()
	o.tasks.Wait()
	return err
}

// Capabilities implements sandbox.Backend.
func (o *OCI) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{RecursiveReadOnlyMounts: true, MountOptions: true, SupplementalGroupsPolicy: true}
}

// Ready implements sandbox.Readier.
func (o *OCI) Ready() error {
	if err := o.machines.Ready(); err != nil {
		return err
	}
	return o.machines.cfg.checkTools()
}

// CreateSandbox implements sandbox.Backend. It boots the pod's machine and prepares the guest for the pod. It also completes
// a partly made pod.
func (o *OCI) CreateSandbox(ctx context.Context, p *sandbox.Pod) error {
	ctx, cancel := context.WithTimeoutCause(ctx, setupTime, fmt.Errorf("the pod's machine was not ready within %s", setupTime))
	defer cancel()
	if err := o.machines.cfg.checkTools(); err != nil {
		return fmt.Errorf("%w (%w)", err, errdefs.ErrFailedPrecondition)
	}
	began := time.Now()
	if err := o.makeShared(p.ID); err != nil {
		return fmt.Errorf("the pod's share: %w", err)
	}
	if err := fpOCIShared.Hit(ctx); err != nil {
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
		o.templates.failed(template, began, errors.Is(err, machine.ErrRefused))
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
		o.templates.want(ctx, p, nil)
	} else {
		o.templates.continued(template)
	}
	return fpOCIMade.Hit(ctx)
}

// adopt begins to watch the pod's containers.
func (o *OCI) adopt(p *sandbox.Pod) *ociPod {
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
func (o *OCI) entry(id string) *ociPod {
	pod := o.pods[id]
	if pod == nil {
		pod = &ociPod{}
		o.pods[id] = pod
	}
	return pod
}

// unshare takes the volumes of a container away.
func (o *OCI) unshare(pod, id string) error {
	o.mu.Lock()
	p := o.entry(pod)
	o.mu.Unlock()
	p.volumes.Lock()
	defer p.volumes.Unlock()
	return o.unshareContainer(pod, id)
}

// running returns the pod, if its machine runs.
func (o *OCI) running(id string) (*ociPod, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if pod := o.pods[id]; pod != nil && pod.watching && !pod.stopping {
		return pod, nil
	}
	return nil, fmt.Errorf("the machine of pod %s is not running: %w", id, errdefs.ErrFailedPrecondition)
}

// stopping records that the pod's machine is about to be killed.
func (o *OCI) stopping(id string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if pod := o.pods[id]; pod != nil {
		pod.stopping = true
	}
}

// StopSandbox implements sandbox.Backend. The containers have already ended. StopSandbox kills the machine, after the guest
// has written the volumes' contents, and releases the volumes, the images and the network.
func (o *OCI) StopSandbox(ctx context.Context, p *sandbox.Pod) error {
	mp, mc := o.machine(p)
	if _, err := o.running(p.ID); err == nil {
		o.syncVolumes(ctx, p)
	}
	o.stopping(p.ID)
	if err := o.machines.StopContainer(ctx, mp, mc, 0); err != nil {
		return err
	}
	if err := fpOCIKilled.Hit(ctx); err != nil {
		return err
	}
	if err := o.machines.StopSandbox(ctx, mp); err != nil {
		return err
	}
	if err := errors.Join(o.removeShared(p.ID), o.closeDisks(ctx, p.ID)); err != nil {
		return err
	}
	return fpOCIFreed.Hit(ctx)
}

// syncVolumes lets the guest write what its pod's volumes contain, before its machine is killed.
func (o *OCI) syncVolumes(ctx context.Context, p *sandbox.Pod) {
	ctx, cancel := context.WithTimeout(ctx, syncTime)
	defer cancel()
	if err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodSync}, nil, nil); err != nil {
		o.log.Warn("a guest has not written all that its pod's volumes contain", "pod", p.ID, "err", err)
	}
}

// RemoveSandbox implements sandbox.Backend.
func (o *OCI) RemoveSandbox(ctx context.Context, p *sandbox.Pod) error {
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
func (o *OCI) removePod(ctx context.Context, id string) error {
	if err := o.removeShared(id); err != nil { // before anything is deleted below a mount
		return err
	}
	return errors.Join(o.closeDisks(ctx, id), os.RemoveAll(o.dir(id)), os.RemoveAll(filepath.Dir(o.containerFile(id, ""))))
}

// Dial implements sandbox.Dialer. Connections to the guest's localhost are sessions.
func (o *OCI) Dial(ctx context.Context, p *sandbox.Pod, _ *sandbox.Container, network, address string) (net.Conn, error) {
	end, err := o.beginSession(p.ID)
	if err != nil {
		return nil, err
	}
	mp, mc := o.machine(p)
	conn, err := o.machines.Dial(ctx, mp, mc, network, address)
	if through, ok := conn.(*agent.Conn); ok && err == nil {
		return sessionConn{through, end}, nil
	}
	end()
	return conn, err
}

// sessionConn is a connection that is a session of its pod.
type sessionConn struct {
	*agent.Conn
	end func()
}

// Close implements net.Conn.
func (c sessionConn) Close() error {
	defer c.end()
	return c.Conn.Close()
}

// PodStats implements sandbox.StatsProvider.
func (o *OCI) PodStats(ctx context.Context, p *sandbox.Pod) (*runtimeapi.LinuxPodSandboxStats, error) {
	mp, _ := o.machine(p)
	return o.machines.PodStats(ctx, mp)
}

// Inspect implements sandbox.Inspector. The facts of a pod are those of its machine.
func (o *OCI) Inspect(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (map[string]any, error) {
	if c != nil {
		return map[string]any{"sandboxID": p.ID}, nil
	}
	mp, mc := o.machine(p)
	v, err := o.machines.Inspect(ctx, mp, mc)
	if err == nil {
		err = o.templates.inspect(ctx, p, v)
	}
	return v, err
}

// Recover implements sandbox.Backend.
func (o *OCI) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	o.ledger.ReportTo(sink)
	found := sandbox.NewFound()
	keep := map[string]bool{}
	var machines []sandbox.Known
	for _, k := range known {
		keep[k.Pod.ID] = true
		mp, mc := o.machine(k.Pod)
		machines = append(machines, sandbox.Known{Pod: mp, Containers: []*sandbox.Container{mc}, Stopped: k.Stopped})
	}
	have, err := o.machines.Recover(ctx, machines, o.machineEnded)
	if err != nil {
		return found, err
	}
	running := func(k sandbox.Known) bool { return have.Containers[k.Pod.ID].State == sandbox.StateRunning }
	says := make([]map[string]sandbox.Status, len(known))
	var asking sync.WaitGroup
	for i, k := range known { // all at once, because a guest may be slow to answer
		if running(k) {
			asking.Go(func() { says[i] = o.askStatuses(ctx, k) })
		}
	}
	asking.Wait()
	for i, k := range known {
		runs := running(k)
		if runs && have.Sandboxes[k.Pod.ID] {
			found.Sandboxes[k.Pod.ID] = true
		}
		for _, c := range k.Containers {
			status, err := o.recoverContainer(k.Pod, c, have.Containers[k.Pod.ID], says[i])
			if err != nil {
				return found, fmt.Errorf("container %s: %w", c.ID, err)
			}
			found.Add(c.ID, status)
		}
		if runs {
			o.adopt(k.Pod)
		}
	}
	if err := o.removeOrphans(ctx, keep); err != nil {
		o.log.Error("remove pods that are not in the record", "err", err)
	}
	return found, nil
}

// removeOrphans removes what belongs to pods that are not to be kept. Their machines are already removed.
func (o *OCI) removeOrphans(ctx context.Context, keep map[string]bool) error {
	orphans := map[string]bool{}
	for _, dir := range []string{filepath.Dir(o.dir("x")), filepath.Join(o.machines.cfg.Root, "oci")} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			orphans[e.Name()] = true
		}
	}
	leases, err := o.images.Disks(ctx)
	if err != nil {
		return err
	}
	for _, key := range leases {
		if pod, ok := podOfLease(key); ok {
			orphans[pod] = true
		}
	}
	var errs []error
	for id := range orphans {
		if hexID().MatchString(id) && !keep[id] {
			o.log.Info("removing a pod that is not in the record", "pod", id)
			errs = append(errs, o.removePod(ctx, id))
		}
	}
	return errors.Join(errs...)
}
