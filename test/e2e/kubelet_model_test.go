package e2e

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/test/harness"
)

// kubelet is a model of the kubelet: its calls to a runtime, their order, and its reactions to the answers. Its only
// state of pods is their specifications and the results of its relists. Like the kubelet it gets everything else from
// the runtime, so a second model over the same directory simulates a restarted kubelet. test/kubelet runs the real
// kubelet; a difference between the two is a defect of the model.
//
//	wait(pod, until …) ──▶ relist ──▶ sync ──▶ RunPodSandbox, CreateContainer, StartContainer, StopContainer …
//	        ▲                │         garbage collection
//	        └────────────────┘ cache
type kubelet struct {
	t       *testing.T
	d       *harness.Daemon
	runtime internalapi.RuntimeService
	images  internalapi.ImageManagerService
	// root replaces /var/lib/kubelet, logs replaces /var/log/pods, and cgroups replaces /kubepods/burstable.
	root, logs, cgroups string
	pleg                pleg
}

func newKubelet(t *testing.T, d *harness.Daemon) *kubelet {
	k := &kubelet{
		t: t, d: d, runtime: d.Runtime(), images: d.Images(),
		root: filepath.Join(d.Dir, "kubelet"), logs: filepath.Join(d.Dir, "pods"), cgroups: d.CgroupParent + "/kubepods/burstable",
		pleg: pleg{seen: map[string]map[string]string{}, cache: map[string]*podStatus{}},
	}
	return k
}

// The restart policies of pods.
const (
	restartAlways = iota
	restartOnFailure
	restartNever
)

// kubePod is a pod as the kubelet gets it from the API server.
type kubePod struct {
	name, uid        string
	init, containers []*kubeContainer
	ephemeral        []*kubeContainer
	restart          int
	sharePID         bool
	hostNetwork      bool
	ofNode           bool // privileged, in the node's PID and IPC namespaces
	handler          string
	ports            []*runtimeapi.PortMapping
	sysctls          map[string]string
	restricted       bool  // according to the Pod Security Standards, without its own user
	grace            int64 // seconds

	deleted    bool // by the user, so the kubelet must end it
	terminated bool // ended, and its cgroup removed
}

// kubeContainer is a container in a pod's specification.
type kubeContainer struct {
	name, image        string
	command            []string
	sidecar            bool // an init container that keeps running
	postStart, preStop []string
	target             string // for an ephemeral container, the container whose processes it sees
	limits             limits
	change             func(*runtimeapi.ContainerConfig)
}

// newPod returns a new pod. Like the kubelet, it creates the pod's cgroup and directories before the first call to the
// runtime.
func (k *kubelet) newPod(name string, containers ...*kubeContainer) *kubePod {
	k.t.Helper()
	p := &kubePod{name: name, uid: fmt.Sprintf("%s-%d", name, time.Now().UnixNano()), containers: containers, grace: 30}
	k.makeCgroup(p)
	k.must(os.MkdirAll(k.dir(p), 0o750))
	k.t.Cleanup(func() {
		p.grace = 2 // because the first process of many containers ignores SIGTERM
		newKubelet(k.t, k.d).remove(p)
	})
	return p
}

func (k *kubelet) must(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *kubelet) dir(p *kubePod) string    { return filepath.Join(k.root, "pods", p.uid) }
func (k *kubelet) logDir(p *kubePod) string { return filepath.Join(k.logs, "ns_"+p.name+"_"+p.uid) }
func (k *kubelet) cgroup(p *kubePod) string { return k.cgroups + "/pod" + p.uid }

// podStatus is the runtime's report of a pod's sandboxes and containers, newest first.
type podStatus struct {
	sandboxes  []*runtimeapi.PodSandboxStatus
	containers []*runtimeapi.ContainerStatus
}

// sandbox returns the newest sandbox if it is ready, otherwise nil.
func (s *podStatus) sandbox() *runtimeapi.PodSandboxStatus {
	if len(s.sandboxes) > 0 && s.sandboxes[0].State == ready {
		return s.sandboxes[0]
	}
	return nil
}

// of returns the newest container with c's name.
func (s *podStatus) of(c *kubeContainer) *runtimeapi.ContainerStatus {
	for _, status := range s.containers {
		if status.Labels["io.kubernetes.container.name"] == c.name {
			return status
		}
	}
	return nil
}

func (s *podStatus) state(c *kubeContainer) string {
	status := s.of(c)
	if status == nil {
		return "none"
	}
	return strings.ToLower(strings.TrimPrefix(status.State.String(), "CONTAINER_"))
}

// status gets the status of all sandboxes and containers of a pod, by its UID.
func (k *kubelet) status(p *kubePod) *podStatus {
	k.t.Helper()
	ctx, byUID := context.Background(), map[string]string{"io.kubernetes.pod.uid": p.uid}
	s := &podStatus{}
	strict := os.Getenv(harness.EnvDelegate) == "" // containerd gives no timestamp, and another name for the image in lists
	sandboxes, err := k.runtime.ListPodSandbox(ctx, &runtimeapi.PodSandboxFilter{LabelSelector: byUID})
	k.must(err)
	for _, item := range sandboxes {
		resp, err := k.runtime.PodSandboxStatus(ctx, item.Id, false)
		if crierrors.IsNotFound(err) {
			continue
		}
		k.must(err)
		if strict && resp.Timestamp == 0 || resp.Status.Metadata.Uid != p.uid || item.CreatedAt != resp.Status.CreatedAt {
			k.t.Errorf("status of sandbox %v: got %v, want the same metadata and times", item, resp)
		}
		s.sandboxes = append(s.sandboxes, resp.Status)
	}
	containers, err := k.runtime.ListContainers(ctx, &runtimeapi.ContainerFilter{LabelSelector: byUID})
	k.must(err)
	for _, item := range containers {
		resp, err := k.runtime.ContainerStatus(ctx, item.Id, false)
		if crierrors.IsNotFound(err) {
			continue
		}
		k.must(err)
		c := resp.Status
		if item.ImageId == "" || item.ImageId != c.ImageId || strict && item.Image.GetImage() != c.Image.GetImage() || c.State < item.State {
			k.t.Errorf("status of container %v: got %v, want the same image and no earlier state", item, c)
		}
		s.containers = append(s.containers, c)
	}
	slices.SortFunc(s.sandboxes, func(a, b *runtimeapi.PodSandboxStatus) int { return cmp.Compare(b.CreatedAt, a.CreatedAt) })
	slices.SortFunc(s.containers, func(a, b *runtimeapi.ContainerStatus) int { return cmp.Compare(b.CreatedAt, a.CreatedAt) })
	return s
}

// wait relists, syncs and collects garbage until cond returns nil. It knows the pod only from its cache.
func (k *kubelet) wait(p *kubePod, cond func(*podStatus) error) *podStatus {
	k.t.Helper()
	var s *podStatus
	harness.Eventually(k.t, waitLimit, func() error {
		k.sync(p, k.cached(p))
		s = k.cached(p)
		return cond(s)
	})
	return s
}

// states waits until the containers have these states, such as "web running, job exited".
func (k *kubelet) states(p *kubePod, want string) *podStatus {
	k.t.Helper()
	return k.wait(p, func(s *podStatus) error {
		var got []string
		for _, c := range slices.Concat(p.init, p.containers, p.ephemeral) {
			got = append(got, c.name+" "+s.state(c))
		}
		if text := strings.Join(got, ", "); text != want {
			return fmt.Errorf("states of the containers: got %s, want %s", text, want)
		}
		return nil
	})
}

// sync takes one step towards the desired state of a pod.
func (k *kubelet) sync(p *kubePod, s *podStatus) {
	k.t.Helper()
	switch {
	case p.terminated:
		return
	case p.deleted:
		k.terminate(p, s)
		return
	case k.finished(p, s):
		k.stopAll(p, s)
		return
	}
	if sandbox := s.sandbox(); sandbox == nil || len(s.readySandboxes()) > 1 || !p.hostNetwork && sandbox.GetNetwork().GetIp() == "" {
		if s = k.newSandbox(p, s); s == nil {
			return
		}
	}
	if k.syncInit(p, s) {
		for _, c := range p.containers {
			if k.shouldStart(p, s.of(c)) {
				k.start(p, s, c)
			}
		}
	}
	for _, c := range p.ephemeral {
		if s.of(c) == nil {
			k.start(p, s, c)
		}
	}
	k.collect(p, k.status(p))
}

func (s *podStatus) readySandboxes() (all []*runtimeapi.PodSandboxStatus) {
	for _, sandbox := range s.sandboxes {
		if sandbox.State == ready {
			all = append(all, sandbox)
		}
	}
	return all
}

// finished reports whether all containers of a pod have ended and none must run again.
func (k *kubelet) finished(p *kubePod, s *podStatus) bool {
	if p.restart == restartAlways {
		return false
	}
	for _, c := range p.containers {
		if status := s.of(c); status == nil || status.State == running || k.shouldStart(p, status) {
			return false
		}
	}
	return true
}

// shouldStart reports whether a container must be started, or started again. A container that was created but never
// started, because the kubelet crashed in between, is left to garbage collection.
func (k *kubelet) shouldStart(p *kubePod, c *runtimeapi.ContainerStatus) bool {
	switch {
	case c == nil:
		return true
	case c.State == running:
		return false
	case c.State != exited:
		return true
	}
	return p.restart == restartAlways || p.restart == restartOnFailure && c.ExitCode != 0
}

// syncInit runs the init containers in order. It returns true if the other containers can start.
func (k *kubelet) syncInit(p *kubePod, s *podStatus) bool {
	begun := slices.ContainsFunc(p.containers, func(c *kubeContainer) bool { return s.state(c) == "running" })
	for _, c := range p.init {
		status := s.of(c)
		switch {
		case c.sidecar && s.state(c) == "running", !c.sidecar && (begun || status != nil && status.State == exited && status.ExitCode == 0):
			continue
		case status != nil && status.State == running:
			return false
		}
		k.start(p, s, c)
		return false
	}
	return true
}

// newSandbox creates the pod's next sandbox. It stops the pod's running containers, and init containers run again.
func (k *kubelet) newSandbox(p *kubePod, s *podStatus) *podStatus {
	k.t.Helper()
	ctx := context.Background()
	k.stopAll(p, s)
	attempt := uint32(0)
	if len(s.sandboxes) > 0 {
		if attempt = s.sandboxes[0].Metadata.Attempt + 1; p.restart == restartNever && len(s.containers) > 0 {
			return nil
		}
	}
	config := k.sandboxConfig(p, attempt)
	k.must(os.MkdirAll(config.LogDirectory, 0o755))
	id, err := k.runtime.RunPodSandbox(ctx, config, p.handler)
	if err != nil {
		k.t.Fatalf("RunPodSandbox %s, attempt %d: %v", p.name, attempt, err)
	}
	for _, c := range p.init {
		for _, status := range k.status(p).containers {
			if status.Metadata.Name == c.name {
				k.removeContainer(status)
			}
		}
	}
	k.relistPod(p) // simulates a relist between the creation of the sandbox and of its containers
	s = k.status(p)
	if s.sandbox().GetId() != id {
		k.t.Errorf("newest ready sandbox: got %v, want %s", s.sandboxes, id)
	}
	return s
}

// start pulls the image if necessary, creates a container, starts it and runs its hook.
func (k *kubelet) start(p *kubePod, s *podStatus, c *kubeContainer) {
	k.t.Helper()
	ctx := context.Background()
	attempt := uint32(0)
	if old := s.of(c); old != nil {
		n, err := strconv.Atoi(old.Annotations["io.kubernetes.container.restartCount"])
		k.must(err)
		attempt = uint32(n) + 1
	}
	config := k.containerConfig(p, c, k.ensureImage(c.image), attempt)
	if c.target != "" {
		ns := config.Linux.SecurityContext.NamespaceOptions
		ns.Pid, ns.TargetId = runtimeapi.NamespaceMode_TARGET, s.of(&kubeContainer{name: c.target}).GetId()
	}
	sandbox := s.sandbox()
	id, err := k.runtime.CreateContainer(ctx, sandbox.Id, config, k.sandboxConfig(p, sandbox.Metadata.Attempt))
	if status.Code(err) == codes.FailedPrecondition && len(k.status(p).readySandboxes()) == 0 {
		k.t.Logf("CreateContainer %s/%s: %v", p.name, c.name, err) // the sandbox has ended since the status was read
		return
	}
	if err != nil {
		k.t.Fatalf("CreateContainer %s/%s: %v", p.name, c.name, err)
	}
	if err := k.runtime.StartContainer(ctx, id); err != nil {
		k.t.Logf("StartContainer %s/%s: %v", p.name, c.name, err) // a kubelet creates an event; the status has the details
		return
	}
	if _, err := os.Stat(filepath.Join(k.logDir(p), config.LogPath)); err != nil {
		k.t.Errorf("log of a running container: %v", err)
	}
	if c.postStart == nil {
		return
	}
	if _, _, err := k.runtime.ExecSync(ctx, id, c.postStart, 0); err != nil {
		k.must(k.runtime.StopContainer(ctx, id, p.grace))
	}
}

// ensureImage pulls an image unless it exists (imagePullPolicy IfNotPresent) and returns the ID from which to create
// containers.
func (k *kubelet) ensureImage(name string) string {
	k.t.Helper()
	ctx, spec := context.Background(), &runtimeapi.ImageSpec{Image: name}
	resp, err := k.images.ImageStatus(ctx, spec, false)
	k.must(err)
	if resp.Image != nil {
		return resp.Image.Id
	}
	ref, err := k.images.PullImage(ctx, spec, nil, &runtimeapi.PodSandboxConfig{})
	k.must(err)
	return ref
}

// stopAll stops a pod's running containers, sidecars last, and its sandboxes.
func (k *kubelet) stopAll(p *kubePod, s *podStatus) {
	k.t.Helper()
	k.stopContainers(p, s, p.containers, p.ephemeral)
	k.stopContainers(p, s, p.init)
	for _, sandbox := range s.sandboxes { // also stopped sandboxes, because the kubelet does not remember them
		k.must(k.runtime.StopPodSandbox(context.Background(), sandbox.Id))
	}
}

// stopContainers runs the hooks of the running containers and stops them, all in parallel.
func (k *kubelet) stopContainers(p *kubePod, s *podStatus, lists ...[]*kubeContainer) {
	k.t.Helper()
	var all sync.WaitGroup
	for _, c := range slices.Concat(lists...) {
		status := s.of(c)
		if status == nil || status.State != running {
			continue
		}
		all.Go(func() {
			begin := time.Now()
			if c.preStop != nil {
				if _, _, err := k.runtime.ExecSync(context.Background(), status.Id, c.preStop, 0); err != nil {
					k.t.Errorf("preStop hook of %s: %v", c.name, err)
				}
			}
			left := max(2, p.grace-int64(time.Since(begin)/time.Second))
			if err := k.runtime.StopContainer(context.Background(), status.Id, left); err != nil && !crierrors.IsNotFound(err) {
				k.t.Errorf("StopContainer %s: %v", c.name, err)
			}
		})
	}
	all.Wait()
}

// terminate ends a pod and removes its cgroup. Garbage collection removes its containers and sandboxes.
func (k *kubelet) terminate(p *kubePod, s *podStatus) {
	k.t.Helper()
	k.stopAll(p, s)
	for _, c := range k.status(p).containers {
		if c.State == running {
			k.t.Errorf("state of %s after the pod was stopped: got running, want exited", c.Metadata.Name)
		}
	}
	k.destroyCgroup(p)
	p.terminated = true
}

// remove deletes a pod and waits until nothing of it is left.
func (k *kubelet) remove(p *kubePod) {
	k.t.Helper()
	p.deleted = true
	k.sync(p, k.status(p))
	s := k.status(p)
	for _, c := range s.containers {
		k.removeContainer(c)
	}
	for _, sandbox := range s.sandboxes {
		k.removeSandbox(sandbox.Id)
	}
	k.must(os.RemoveAll(k.logDir(p)))
	k.must(os.RemoveAll(k.dir(p))) // fails if a volume is still in use
	if s := k.status(p); len(s.containers)+len(s.sandboxes) > 0 {
		k.t.Errorf("status of %s after its removal: got %v, want none", p.name, s)
	}
}
