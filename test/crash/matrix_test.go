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

// points lists the fail points in the daemon's program that have one of the prefixes.
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

// Prefixes of fail points that not every script passes.
const (
	retainPoint  = "node.retain-attempt."       // only unit pods with a second attempt; the tests of internal/node visit them
	noBootPoints = "vm.no-boot."                // only machines that cannot boot; the tests of internal/sandbox/vm visit them
	diskPoints   = "vm.disk."                   // only machines that get disks while they run; the tests of internal/sandbox/vm visit them
	tapPoints    = "network.tap."               // only machines
	usersPoint   = "linux.create-sandbox.users" // only pods with a user namespace
	batchPoint   = "network.bridge.del.marked"  // only networks that are released together; the tests of internal/network visit it
)

// without returns the names that do not have the prefix.
func without(names []string, prefix string) []string {
	return slices.DeleteFunc(names, func(name string) bool { return strings.HasPrefix(name, prefix) })
}

// victim returns the pod with which the script makes its calls. The pod shares its PID namespace, so that it has an
// init process too.
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
			_, err := cri.UpdatePodSandboxResources(ctx, &runtimeapi.UpdatePodSandboxResourcesRequest{
				PodSandboxId: p.PodSandboxId, Resources: &runtimeapi.LinuxContainerResources{CpuShares: 768},
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

// TestN1KilledAtEveryFailPoint kills the daemon with SIGKILL at each fail point in the life of a pod, and starts it
// again. The record must then be true, another pod must be unaffected, and nothing of the victim may be left after its
// removal.
func TestN1KilledAtEveryFailPoint(t *testing.T) {
	for _, runtime := range runtimes() {
		t.Run(runtime, func(t *testing.T) { visitAll(t, runtime) })
	}
}

// runtimes returns crun and, for make test-all, runc.
func runtimes() []string {
	if os.Getenv("TRIPOD_TEST_FULL") != "" {
		return []string{"crun", "runc"}
	}
	return []string{"crun"}
}

// crash is a crash of a daemon while it runs the script with a victim.
type crash struct {
	d         *harness.Daemon
	handler   string
	pod       *runtimeapi.PodSandboxConfig
	container *runtimeapi.ContainerConfig
	bystander string // the ID of a pod that keeps running
	before    harness.Resources
}

// at kills the daemon at a fail point and starts it again. Then check must return nil, nothing of the victim may be
// left after its removal, and the same calls must succeed.
func (c crash) at(t *testing.T, point string, check func() error) {
	t.Helper()
	c.d.Restart(failpoint.Variable + "=" + point + "=kill")
	err := script(c.d, c.handler, c.pod, c.container)
	state := c.d.WaitExit(10 * time.Second)
	if status := state.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
		t.Fatalf("the daemon ended with %v, the script with error %v; want SIGKILL at the fail point", state, err)
	}
	c.d.Start()
	if err := check(); err != nil {
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
	clock := bystander.Run(harness.ContainerConfig("clock", harness.Busybox,
		harness.Shell("i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.1; done")))
	clock.WaitLog("tick 1")
	pod, container := victim(t)
	if err := script(d, "linux", pod, container); err != nil {
		t.Fatalf("the script without a crash: %v", err)
	}
	before := resources(d)
	names := points(t, "node.", "network.", "linux.")
	for _, prefix := range []string{tapPoints, retainPoint, batchPoint} {
		names = without(names, prefix)
	}
	for _, point := range names {
		t.Run(point, func(t *testing.T) {
			pod, container := victim(t)
			if point == usersPoint {
				pod.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{}
			}
			c := crash{d: d, handler: "linux", pod: pod, container: container, bystander: bystander.ID, before: before}
			c.at(t, point, func() error { return errors.Join(recordIsTrue(d), stillTicking(clock)) })
		})
	}
	if len(names) < 40 {
		t.Errorf("fail points visited: got %d, want at least 40", len(names))
	}
}

// resources returns the resources of the pods. It leaves out the daemon's open files, because each start is a new
// process, and the bystander's sleep processes, which change all the time.
func resources(d *harness.Daemon) harness.Resources {
	r := harness.Snapshot(d)
	r.Files = nil
	maps.DeleteFunc(r.Processes, func(name string, _ int) bool { return strings.HasSuffix(name, " sleep 0.1") })
	return r
}

// recordIsTrue compares the state that the daemon reports for each container with the container's processes.
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
			errs = append(errs, fmt.Errorf("container %s is reported as %s, but an exec in it succeeds: %v (error %v)", c.Metadata.Name, c.State,
				runs, err))
		}
		status, err := d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.Id})
		if err != nil {
			errs = append(errs, err)
		} else if s := status.Status; s.State == runtimeapi.ContainerState_CONTAINER_EXITED && (s.FinishedAt == 0 || s.Reason == "") {
			errs = append(errs, fmt.Errorf("status of container %s: got %v, want a time and a reason of its end", c.Metadata.Name, s))
		}
	}
	return errors.Join(errs...)
}

// stillTicking waits for a new line of the bystander and checks that no line before it is missing.
func stillTicking(clock *harness.Container) error {
	count := len(clock.Logs())
	clock.WaitLog(fmt.Sprintf("tick %d\n", count+1))
	for i, line := range clock.Logs() {
		if want := fmt.Sprintf("tick %d", i+1); strings.TrimSpace(line.Text) != want {
			return fmt.Errorf("line %d of the bystander's log: got %q, want %q", i+1, line.Text, want)
		}
	}
	return nil
}

// removeVictims removes all pods except the bystander.
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
				t.Errorf("state of the bystander: got %s, want ready", p.State)
			}
			continue
		}
		if _, err := d.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.Id}); err != nil {
			t.Errorf("remove %s: %v", p.Metadata.Name, err)
		}
	}
}
