package crash

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// points lists the fail points of the daemon's program with one of the prefixes.
func points(t *testing.T, prefixes ...string) []string {
	t.Helper()
	var names []string
	for _, name := range harness.FailPoints(t) {
		for _, prefix := range prefixes {
			if strings.HasPrefix(name, prefix) {
				names = append(names, name)
			}
		}
	}
	return names
}

// retainPoint is passed by unit pods alone, when a next attempt follows one that ended; internal/node visits it.
const retainPoint = "node.retain-attempt."

// noBootPoints are passed by machines that cannot boot alone; internal/sandbox/vm visits them.
const noBootPoints = "vm.no-boot."

// tapPoints are the fail points of what machines' networks have besides.
const tapPoints = "network.tap."

// without leaves out the names with the prefix.
func without(names []string, prefix string) []string {
	return slices.DeleteFunc(names, func(name string) bool { return strings.HasPrefix(name, prefix) })
}

// victim is the pod that the script takes through its life. It shares its PID namespace, so that its init process is
// at stake, too.
func victim(t *testing.T) (*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig) {
	pod := harness.PodConfig(t, "victim", harness.Namespaces(func(n *runtimeapi.NamespaceOption) { n.Pid = runtimeapi.NamespaceMode_POD }))
	container := harness.ContainerConfig("c", harness.Busybox, harness.Sleep())
	container.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
	return pod, container
}

// script makes every lifecycle call once, in order, until one fails.
func script(d *harness.Daemon, handler string, pod *runtimeapi.PodSandboxConfig, container *runtimeapi.ContainerConfig) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cri := d.CRI()
	p, err := cri.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: pod, RuntimeHandler: handler})
	if err != nil {
		return err
	}
	c, err := cri.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.PodSandboxId, Config: container, SandboxConfig: pod})
	if err != nil {
		return err
	}
	for _, call := range []func() error{
		func() error {
			_, err := cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.ContainerId})
			return err
		},
		func() error {
			_, err := cri.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{
				ContainerId: c.ContainerId, Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512},
			})
			return err
		},
		func() error {
			_, err := cri.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: c.ContainerId, Timeout: 10})
			return err
		},
		func() error {
			_, err := cri.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: c.ContainerId})
			return err
		},
		func() error {
			_, err := cri.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.PodSandboxId})
			return err
		},
		func() error {
			_, err := cri.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.PodSandboxId})
			return err
		},
	} {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

// TestN1KilledAtEveryFailPoint kills the daemon with SIGKILL at each fail point that a pod's life passes, starts it
// again, and demands: a record that is true, a bystander that never noticed, no trace of the victim once it is removed.
func TestN1KilledAtEveryFailPoint(t *testing.T) {
	for _, runtime := range runtimes() {
		t.Run(runtime, func(t *testing.T) { visitAll(t, runtime) })
	}
}

// runtimes are crun and, in the long form of the tests, runc.
func runtimes() []string {
	if os.Getenv("TRIPOD_TEST_FULL") != "" {
		return []string{"crun", "runc"}
	}
	return []string{"crun"}
}

// crash is a victim's life on a daemon that is killed in it.
type crash struct {
	d         *harness.Daemon
	handler   string
	pod       *runtimeapi.PodSandboxConfig
	container *runtimeapi.ContainerConfig
	bystander string // a pod that stays
	before    harness.Resources
}

// at kills the daemon at a fail point and starts it again. Then holds must find nothing wrong, no trace of the victim may stay,
// and the same calls must succeed.
func (c crash) at(t *testing.T, point string, holds func() error) {
	t.Helper()
	c.d.Restart(failpoint.Variable + "=" + point + "=kill")
	err := script(c.d, c.handler, c.pod, c.container)
	state := c.d.WaitExit(10 * time.Second)
	if status := state.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
		t.Fatalf("the daemon ended with %v, the script with %v: the point was never passed", state, err)
	}
	c.d.Start()
	if err := holds(); err != nil {
		t.Error(err)
	}
	removeVictims(t, c.d, c.bystander)
	harness.Eventually(t, 10*time.Second, func() error { return c.before.Leaks(resources(c.d)) })
	if err := script(c.d, c.handler, c.pod, c.container); err != nil {
		t.Errorf("the same calls after the crash: %v", err)
	}
}

func visitAll(t *testing.T, runtime string) {
	d := harness.StartDaemon(t, harness.Set("linux.runtime", runtime))
	bystander := d.RunPod(t, harness.PodConfig(t, "bystander"))
	clock := bystander.Run(harness.ContainerConfig("clock", harness.Busybox, harness.Shell("i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.1; done")))
	clock.WaitLog("tick 1")
	pod, container := victim(t)
	if err := script(d, "linux", pod, container); err != nil {
		t.Fatalf("the script without a crash: %v", err)
	}
	before := resources(d)
	names := without(without(points(t, "node.", "network.", "linux."), tapPoints), retainPoint)
	for _, point := range names {
		t.Run(point, func(t *testing.T) {
			pod, container := victim(t)
			c := crash{d: d, handler: "linux", pod: pod, container: container, bystander: bystander.ID, before: before}
			c.at(t, point, func() error { return errors.Join(recordIsTrue(d), stillTicking(clock)) })
		})
	}
	if len(names) < 40 {
		t.Errorf("only %d fail points were visited", len(names))
	}
}

// resources are those that the pods hold: without the open files, which are of another daemon each time, and without
// the bystander's pauses, which are another process each time.
func resources(d *harness.Daemon) harness.Resources {
	r := harness.Snapshot(d)
	r.Files = nil
	maps.DeleteFunc(r.Processes, func(name string, _ int) bool { return strings.HasSuffix(name, " sleep 0.1") })
	return r
}

// recordIsTrue holds what the daemon says of each container against its processes.
func recordIsTrue(d *harness.Daemon) error {
	ctx := context.Background()
	list, err := d.CRI().ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range list.Containers {
		resp, err := d.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.Id, Cmd: []string{"true"}, Timeout: 10})
		runs := err == nil && resp.ExitCode == 0
		if says := c.State == runtimeapi.ContainerState_CONTAINER_RUNNING; says != runs {
			errs = append(errs, fmt.Errorf("container %s is %s; a program could be run in it: %v (%v)", c.Metadata.Name, c.State, runs, err))
		}
		status, err := d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.Id})
		if err != nil {
			errs = append(errs, err)
		} else if s := status.Status; s.State == runtimeapi.ContainerState_CONTAINER_EXITED && (s.FinishedAt == 0 || s.Reason == "") {
			errs = append(errs, fmt.Errorf("container %s has ended without a time or a reason: %v", c.Metadata.Name, s))
		}
	}
	return errors.Join(errs...)
}

// stillTicking waits for a line that the bystander writes after now, and looks whether one is missing before it.
func stillTicking(clock *harness.Container) error {
	count := len(clock.Logs())
	clock.WaitLog(fmt.Sprintf("tick %d\n", count+1))
	for i, line := range clock.Logs() {
		if want := fmt.Sprintf("tick %d", i+1); strings.TrimSpace(line.Text) != want {
			return fmt.Errorf("line %d of the bystander's log is %q, not %q", i+1, line.Text, want)
		}
	}
	return nil
}

// removeVictims removes every pod but the bystander.
func removeVictims(t *testing.T, d *harness.Daemon, bystander string) {
	t.Helper()
	ctx := context.Background()
	list, err := d.CRI().ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Items {
		if p.Id == bystander {
			if p.State != runtimeapi.PodSandboxState_SANDBOX_READY {
				t.Errorf("the bystander is %s", p.State)
			}
			continue
		}
		if _, err := d.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.Id}); err != nil {
			t.Errorf("remove %s: %v", p.Metadata.Name, err)
		}
	}
}
