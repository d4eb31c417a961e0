package guestnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/identity"
	"github.com/tripod-run/tripod/internal/stats"
)

// Backend is what runs the containers.
type Backend interface {
	sandbox.Backend
	sandbox.Execer
	sandbox.Attacher
	sandbox.Updater
	sandbox.PodUpdater
	sandbox.StatsProvider
}

// Open opens the backend with the given images. Its directories are below root and runDir.
type Open func(ctx context.Context, root, runDir string, images *Images) (Backend, error)

// The directories in the guest.
const (
	scratch  = "/scratch"
	runDir   = "/run/tripod"
	stateDir = runDir + "/state" // gone after a reboot of the guest, which its node must notice
	netns    = runDir + "/netns"
)

// Node is the pod of the guest and its containers.
type Node struct {
	log    *slog.Logger
	images *Images
	state  string // the directory with the record of the containers
	// ready is closed when backend and failure are set.
	ready   chan struct{}
	backend Backend
	failure error

	setup sync.Mutex // held by MethodSetup

	mu         sync.Mutex
	pod        *sandbox.Pod
	containers map[string]*sandbox.Container
	watchers   map[*watcher]bool
}

// Run serves the daemon until the ports fail. It begins to open the backend before the daemon calls.
func Run(version string, open Open, log *slog.Logger) {
	n := &Node{
		log: log, state: stateDir, images: newImages(scratch + "/layers"), ready: make(chan struct{}),
		containers: map[string]*sandbox.Container{}, watchers: map[*watcher]bool{},
	}
	go func() {
		defer close(n.ready)
		n.backend, n.failure = n.start(open)
		if n.failure != nil {
			log.Error("cannot run containers", "err", n.failure)
		}
	}()
	guestagent.Run(version, n.serve)
}

// start mounts the scratch disk, opens the backend and recovers what an earlier tripod-guest has left.
func (n *Node) start(open Open) (Backend, error) {
	if err := mountScratch(); err != nil {
		return nil, err
	}
	// The backend finds out in a cgroup, not in the root, which limits the kernel has.
	for _, dir := range []string{stateDir, guestapi.Logs, runDir, guestapi.Shared, "/sys/fs/cgroup/tripod"} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	backend, err := open(context.Background(), scratch+"/containers", runDir+"/containers", n.images)
	if err != nil {
		return nil, err
	}
	known, err := n.load()
	if err != nil {
		return nil, err
	}
	_, err = backend.Recover(context.Background(), known, n.report)
	return backend, err
}

// load reads the pod and the containers that an earlier tripod-guest has recorded.
func (n *Node) load() ([]sandbox.Known, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var p guestapi.Pod
	if err := readJSON(podFile, &p); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	n.pod = &p.Pod
	known := sandbox.Known{Pod: n.pod}
	files, err := filepath.Glob(n.containerFile("*"))
	for _, file := range files {
		var c guestapi.Create
		if err := readJSON(file, &c); err != nil {
			return nil, err
		}
		n.containers[c.Container.ID] = &c.Container.Container
		n.images.add(c.Images)
		known.Containers = append(known.Containers, &c.Container.Container)
	}
	return []sandbox.Known{known}, err
}

const podFile = stateDir + "/pod.json"

func (n *Node) containerFile(id string) string {
	return filepath.Join(n.state, "container-"+id+".json")
}

func readJSON(file string, into any) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, into)
}

func writeJSON(file string, value any) error {
	raw, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return atomicfile.Replace(file, raw, 0o600)
}

// serve is the guestagent.Service.
func (n *Node) serve(call guestagent.Call) wire.Result {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-call.Done:
			cancel()
		case <-ctx.Done():
		}
	}()
	code, err := n.call(ctx, call)
	if err != nil {
		return wire.Result{Class: classOf(err), Message: err.Error()}
	}
	return wire.Result{Exit: code}
}

func (n *Node) call(ctx context.Context, call guestagent.Call) (int32, error) {
	received := time.Now()
	var r guestapi.Request
	if err := json.Unmarshal(call.Request, &r); err != nil {
		return 0, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	select {
	case <-n.ready:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	if n.failure != nil {
		return 0, fmt.Errorf("the guest cannot run containers: %w", n.failure)
	}
	switch r.Method {
	case guestapi.MethodSetup:
		return 0, with(call, func(s guestapi.Setup) error { return n.setUp(ctx, s, received) })
	case guestapi.MethodSync:
		unix.Sync()
		return 0, nil
	case guestapi.MethodTrim:
		return 0, trim(scratch)
	case guestapi.MethodClock:
		return 0, with(call, func(c guestapi.Clock) error {
			if c.Behind == 0 {
				return answer(call.Out, guestapi.Clock{Now: time.Now()}, nil)
			}
			return adjustClock(c.Behind)
		})
	case guestapi.MethodFreeze:
		freeze()
		return 0, nil
	}
	p, err := n.podNow()
	if err != nil {
		return 0, err
	}
	switch r.Method {
	case guestapi.MethodCreate:
		return 0, with(call, func(c guestapi.Create) error { return n.create(ctx, p, c, call.Out) })
	case guestapi.MethodUpdatePod:
		return 0, with(call, func(p guestapi.Pod) error { return n.updatePod(ctx, &p.Pod, p.CPUs) })
	case guestapi.MethodPodStats:
		stats, err := n.backend.PodStats(ctx, p)
		return 0, answer(call.Out, stats, err)
	case guestapi.MethodStatuses:
		statuses, err := n.statuses(ctx, p)
		return 0, answer(call.Out, statuses, err)
	case guestapi.MethodEvents:
		return 0, n.watch(ctx, p, call.Out)
	case guestapi.MethodRemove:
		return 0, n.remove(ctx, p, r.Container)
	}
	c, err := n.container(r.Container)
	if err != nil {
		return 0, err
	}
	switch r.Method {
	case guestapi.MethodStart:
		return 0, n.startContainer(ctx, p, c, call.Out)
	case guestapi.MethodStop:
		return 0, with(call, func(s guestapi.Stop) error {
			return passed(ctx, n.backend.StopContainer(ctx, p, c, s.Grace), fpStopped)
		})
	case guestapi.MethodUpdate:
		return 0, with(call, func(c guestapi.Container) error { return n.update(ctx, p, &c.Container) })
	case guestapi.MethodStats:
		stats, err := n.backend.ContainerStats(ctx, p, c)
		return 0, answer(call.Out, stats, passed(ctx, err, fpMeasured))
	case guestapi.MethodSamples:
		figures, err := n.figures(ctx, p, c)
		return 0, answer(call.Out, figures, err)
	case guestapi.MethodLog:
		return 0, n.follow(ctx, p, c, r.Offset, call)
	case guestapi.MethodExec:
		return n.exec(ctx, p, c, r, call)
	case guestapi.MethodAttach:
		return 0, n.attach(ctx, p, c, r, call)
	}
	return 0, fmt.Errorf("method %q: %w", r.Method, errdefs.ErrNotImplemented)
}

// passed returns the error of a step, or that of the fail point after it.
func passed(ctx context.Context, err error, point *failpoint.Point) error {
	if err != nil {
		return err
	}
	return point.Hit(ctx)
}

// with decodes the body of a call.
func with[T any](call guestagent.Call, do func(T) error) error {
	var body T
	if err := json.NewDecoder(call.In).Decode(&body); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	return do(body)
}

// answer sends the answer of a call, unless the call has failed.
func answer(out io.Writer, value any, err error) error {
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(value)
}

func (n *Node) podNow() (*sandbox.Pod, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.pod == nil {
		return nil, fmt.Errorf("the guest has no pod yet: %w", errdefs.ErrFailedPrecondition)
	}
	return n.pod, nil
}

func (n *Node) container(id string) (*sandbox.Container, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if c := n.containers[id]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("the guest has no container %s: %w", id, errdefs.ErrNotFound)
}

// setUp prepares the guest for its pod.
func (n *Node) setUp(ctx context.Context, s guestapi.Setup, received time.Time) error {
	n.setup.Lock()
	defer n.setup.Unlock()
	if err := identity.SetClock(s.Now.Sub(received)); err != nil {
		return err
	}
	began := time.Now()
	if err := identity.Reseed(s.Seed); err != nil { // before any program of the pod runs
		return fmt.Errorf("seed the random numbers: %w: %w", err, errdefs.ErrUnavailable)
	}
	if err := configure(ctx, s); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	p := &s.Pod.Pod
	p.Netns = netns
	configured := time.Now()
	defer func() { n.log.Info("set up", "devices", configured.Sub(began), "pod", time.Since(configured)) }()
	if err := n.backend.Validate(p, nil); err != nil {
		return err
	}
	if err := passed(ctx, n.setPod(p), fpPodRecorded); err != nil {
		return err
	}
	return passed(ctx, n.backend.CreateSandbox(ctx, p), fpPodMade)
}

func (n *Node) setPod(p *sandbox.Pod) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pod = p
	return writeJSON(podFile, guestapi.Pod{Pod: *p})
}

func (n *Node) updatePod(ctx context.Context, p *sandbox.Pod, cpus int) error {
	if err := putOnline(ctx, cpus); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	p.Netns = netns
	if err := passed(ctx, n.backend.UpdateSandbox(ctx, p), fpPodUpdated); err != nil {
		return err
	}
	return n.setPod(p)
}

func (n *Node) create(ctx context.Context, p *sandbox.Pod, c guestapi.Create, out io.Writer) error {
	if err := passed(ctx, errors.Join(n.images.mount(ctx, c.Images), findDevices(ctx, c)), fpImagesMounted); err != nil {
		return err
	}
	if err := n.backend.Validate(p, &c.Container.Container); err != nil {
		return err
	}
	loadTables(c.Container.Config.GetLinux().GetSecurityContext())
	if err := passed(ctx, n.setContainer(c), fpContainerRecorded); err != nil {
		return err
	}
	resolved, err := n.backend.CreateContainer(ctx, p, &c.Container.Container)
	return answer(out, resolved, passed(ctx, err, fpContainerMade))
}

func (n *Node) setContainer(c guestapi.Create) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.containers[c.Container.ID] = &c.Container.Container
	return writeJSON(n.containerFile(c.Container.ID), c)
}

// startContainer starts a container and answers with its status, which may already be that of an ended one. That of a program
// that cannot be executed has the reason.
func (n *Node) startContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, out io.Writer) error {
	failed := n.backend.StartContainer(ctx, p, c)
	status, err := n.backend.Status(ctx, p, c)
	if failed != nil && (err != nil || status.Reason != sandbox.ReasonStartError || !errdefs.IsFailedPrecondition(failed)) {
		return failed
	}
	return answer(out, status, passed(ctx, err, fpStarted))
}

// figures returns the statistics and samples of a container. The samples about file systems are left out, because the node's
// disks are not the guest's.
func (n *Node) figures(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (f guestapi.Figures, err error) {
	var samples stats.Samples
	if f.Stats, samples, err = n.backend.ContainerSamples(ctx, p, c); err != nil {
		return f, err
	}
	for _, s := range samples {
		if !strings.HasPrefix(s.Family.Name, "container_fs_") && !math.IsNaN(s.Value) && !math.IsInf(s.Value, 0) {
			f.Samples = append(f.Samples, guestapi.Sample{Family: s.Family.Name, Value: s.Value, Labels: s.Labels})
		}
	}
	return f, nil
}

func (n *Node) update(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	n.mu.Lock()
	known := n.containers[c.ID]
	if known == nil {
		n.mu.Unlock()
		return fmt.Errorf("the guest has no container %s: %w", c.ID, errdefs.ErrNotFound)
	}
	updated := *known
	updated.Config, updated.Adjustment = proto.CloneOf(known.Config), c.Adjustment
	updated.Config.Linux = c.Config.GetLinux()
	n.mu.Unlock()
	if err := passed(ctx, n.backend.UpdateContainer(ctx, p, &updated), fpUpdated); err != nil {
		return err
	}
	return passed(ctx, n.replaceContainer(&updated), fpUpdateRecorded)
}

// replaceContainer records that the container was updated.
func (n *Node) replaceContainer(c *sandbox.Container) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.containers[c.ID] == nil {
		return fmt.Errorf("the guest has no container %s any more: %w", c.ID, errdefs.ErrNotFound)
	}
	n.containers[c.ID] = c
	var recorded guestapi.Create
	if err := readJSON(n.containerFile(c.ID), &recorded); err != nil {
		return err
	}
	recorded.Container.Container = *c
	return writeJSON(n.containerFile(c.ID), recorded)
}

func (n *Node) remove(ctx context.Context, p *sandbox.Pod, id string) error {
	if err := passed(ctx, n.backend.RemoveContainer(ctx, p, &sandbox.Container{ID: id}), fpRemoved); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.containers[id]
	delete(n.containers, id)
	if c != nil {
		_ = os.Remove(logFile(p, c))
	}
	if err := os.Remove(n.containerFile(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return fpForgotten.Hit(ctx)
}

// statuses returns the statuses of all containers by their IDs.
func (n *Node) statuses(ctx context.Context, p *sandbox.Pod) (map[string]sandbox.Status, error) {
	n.mu.Lock()
	containers := slices.Collect(maps.Values(n.containers))
	n.mu.Unlock()
	all := map[string]sandbox.Status{}
	for _, c := range containers {
		status, err := n.backend.Status(ctx, p, c)
		if err != nil {
			return nil, err
		}
		all[c.ID] = status
	}
	return all, nil
}

// classOf returns the class of an error for the daemon.
func classOf(err error) wire.Class {
	switch {
	case errdefs.IsInvalidArgument(err):
		return wire.ClassInvalidArgument
	case errdefs.IsNotFound(err):
		return wire.ClassNotFound
	case errdefs.IsFailedPrecondition(err):
		return wire.ClassFailedPrecondition
	case errdefs.IsNotImplemented(err):
		return wire.ClassUnimplemented
	case errdefs.IsResourceExhausted(err):
		return wire.ClassExhausted
	case errdefs.IsUnavailable(err), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return wire.ClassUnavailable
	}
	return wire.ClassInternal
}
