package e2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// adoption is a daemon that takes over a node from the containerd behind it, as in docs/migrate.md.
type adoption struct {
	d   *harness.Daemon
	own *harness.Pod
	// pod and container ran before the daemon was there.
	pod, container string
	config         *runtimeapi.PodSandboxConfig
	started        int64
}

// TestMigrateFromContainerd walks through docs/migrate.md with a real containerd.
func TestMigrateFromContainerd(t *testing.T) {
	if os.Getenv(harness.EnvDelegate) == "" {
		t.Skip(harness.EnvDelegate + " names no containerd; make test-delegate sets it")
	}
	a := &adoption{d: harness.NewDaemon(t)}
	a.runAtContainerd(t)
	t.Run("the node adopts containerd with its pods", a.adopt)
	t.Run("containerd's containers have events", a.events)
	t.Run("own pods and lists do not wait for a stopped containerd", a.stopped)
	t.Run("containerd restarts", a.restarted)
	t.Run("the default handler moves", a.moved)
}

// runAtContainerd runs a pod as a kubelet does while its endpoint is containerd.
func (a *adoption) runAtContainerd(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	conn, err := harness.Dial(a.d.Containerd().Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	runtime, images := runtimeapi.NewRuntimeServiceClient(conn), runtimeapi.NewImageServiceClient(conn)
	if _, err := images.PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.Busybox}}); err != nil {
		t.Fatal(err)
	}
	config := harness.PodConfig(t, "old")
	config.Linux.CgroupParent = a.d.CgroupParent
	a.config = config
	pod, err := runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil {
		t.Fatal(err)
	}
	c, err := runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
		PodSandboxId: pod.GetPodSandboxId(), SandboxConfig: config, Config: harness.ContainerConfig("c", harness.Busybox, harness.Sleep()),
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := runtime.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.GetContainerId()}); err != nil {
		t.Fatal(err)
	}
	status, err := runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.GetContainerId()})
	if err != nil {
		t.Fatal(err)
	}
	a.pod, a.container, a.started = pod.GetPodSandboxId(), c.GetContainerId(), status.GetStatus().GetStartedAt()
}

// wantOld checks that the first container runs on under its ID.
func (a *adoption) wantOld(t *testing.T) {
	t.Helper()
	resp, err := a.d.CRI().ContainerStatus(context.Background(), &runtimeapi.ContainerStatusRequest{ContainerId: a.container})
	if s := resp.GetStatus(); err != nil || s.GetState() != running || s.GetStartedAt() != a.started {
		t.Errorf("the container from before: got %v, error %v; want it running since %d", s, err, a.started)
	}
	if !slices.Contains(listedPods(t, a.d, nil), a.pod) {
		t.Error("the pod from before is not listed")
	}
}

func (a *adoption) adopt(t *testing.T) {
	a.d.Start()
	a.wantOld(t)
	resp, err := a.d.CRI().ExecSync(context.Background(),
		&runtimeapi.ExecSyncRequest{ContainerId: a.container, Cmd: []string{"echo", "adopted"}, Timeout: 60})
	if err != nil || string(resp.GetStdout()) != "adopted\n" {
		t.Errorf("ExecSync: got %q, error %v; want adopted", resp.GetStdout(), err)
	}
	a.own = a.d.RunPodWith(t, harness.PodConfig(t, "own"), "linux")
	if got := a.own.Status().GetRuntimeHandler(); got != "linux" {
		t.Errorf("handler of a new pod: got %q, want linux", got)
	}
}

// events follows a container at containerd 1.6, which has no events, from its creation to its removal.
func (a *adoption) events(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	stream, err := a.d.CRI().GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	made, err := a.d.CRI().CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
		PodSandboxId: a.pod, SandboxConfig: a.config, Config: harness.ContainerConfig("events", harness.Busybox, harness.Sleep()),
	})
	if err != nil {
		t.Fatal(err)
	}
	id := made.GetContainerId()
	await := func(what runtimeapi.ContainerEventType) *runtimeapi.ContainerEventResponse {
		for {
			e, err := stream.Recv()
			if err != nil {
				t.Fatalf("no %v of %s: %v", what, id, err)
			}
			if e.GetContainerId() == id && e.GetContainerEventType() == what {
				return e
			}
		}
	}
	await(runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
	if _, err := a.d.CRI().RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	if got := await(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT).GetPodSandboxStatus().GetId(); got != a.pod {
		t.Errorf("the event is of pod %s, want %s", got, a.pod)
	}
}

// stopped compares latencies with and without an answering containerd. The first call after the stop waits for the
// timeout; it is one of many.
func (a *adoption) stopped(t *testing.T) {
	if err := a.d.Ready(); err != nil {
		t.Fatal(err)
	}
	before := a.latencies(t)
	a.d.Containerd().Signal(syscall.SIGSTOP)
	during := a.latencies(t)
	a.d.Containerd().Signal(syscall.SIGCONT)
	for call, took := range before {
		t.Logf("p99 of %s: %v with containerd, %v with a stopped containerd", call, took, during[call])
		if during[call] >= 2*took {
			t.Errorf("p99 of %s: got %v while containerd is stopped, want less than twice %v", call, during[call], took)
		}
	}
	harness.Eventually(t, waitLimit, a.d.Ready)
	a.wantOld(t)
}

// latencies returns the 99th percentile of each call.
func (a *adoption) latencies(t *testing.T) map[string]time.Duration {
	t.Helper()
	const rounds = 1000
	ctx := context.Background()
	calls := map[string]func() error{
		"ListPodSandbox": func() error {
			resp, err := a.d.CRI().ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
			if err == nil && len(resp.GetItems()) != 2 {
				err = fmt.Errorf("%d pods, want 2", len(resp.GetItems()))
			}
			return err
		},
		"ListContainers": func() error {
			_, err := a.d.CRI().ListContainers(ctx, &runtimeapi.ListContainersRequest{})
			return err
		},
		"PodSandboxStatus": func() error {
			_, err := a.d.CRI().PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: a.own.ID})
			return err
		},
		"Status": func() error {
			_, err := a.d.CRI().Status(ctx, &runtimeapi.StatusRequest{})
			return err
		},
	}
	p99 := map[string]time.Duration{}
	took := map[string][]time.Duration{}
	for range rounds {
		for name, call := range calls {
			began := time.Now()
			if err := call(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			took[name] = append(took[name], time.Since(began))
		}
	}
	for name, all := range took {
		slices.Sort(all)
		p99[name] = all[len(all)*99/100]
	}
	return p99
}

func (a *adoption) restarted(t *testing.T) {
	c := a.d.Containerd()
	c.Stop()
	a.wantListed(t)
	c.Start(os.Getenv(harness.EnvDelegate))
	harness.Eventually(t, waitLimit, a.d.Ready)
	a.wantOld(t)
}

// wantListed checks that lists contain the first pod.
func (a *adoption) wantListed(t *testing.T) {
	t.Helper()
	if got := listedPods(t, a.d, nil); !slices.Contains(got, a.pod) {
		t.Errorf("ListPodSandbox while containerd is away: got %v, want %s", got, a.pod)
	}
}

// moved gives the default handler to the node. Pods at containerd run on, and new ones can still be had by name.
func (a *adoption) moved(t *testing.T) {
	a.d.Stop()
	a.d.Reconfigure(harness.Delegate(a.d.Containerd().Socket, "runc"))
	a.d.Start()
	a.wantOld(t)
	if got := startPod(t, a.d).Status().GetRuntimeHandler(); got != "linux" {
		t.Errorf("handler of a new pod: got %q, want linux", got)
	}
	named := a.d.RunPodWith(t, harness.PodConfig(t, "named"), "runc")
	if got := named.Status().GetRuntimeHandler(); got != "runc" {
		t.Errorf("handler of a new pod at containerd: got %q, want runc", got)
	}
	ctx := context.Background()
	if _, err := a.d.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: a.pod}); err != nil {
		t.Error(err)
	}
	if _, err := a.d.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: a.pod}); err != nil {
		t.Error(err)
	}
	if strings.Contains(strings.Join(listedPods(t, a.d, nil), " "), a.pod) {
		t.Error("the removed pod is still listed")
	}
}
