package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

const (
	// setUpPoints begin the names of the guest's fail points that are passed before a pod has containers.
	linuxSetUp, guestSetUp = "linux.create-sandbox.", "vm-guest.set-up."
	// guestRemoval is never passed in a guest, whose machine is killed instead.
	guestRemoval = "linux.remove-sandbox."
	// stopCode is the exit code of a victim that was asked to stop.
	stopCode = 7
)

// agentPoints are those of the guest's fail points that `make test` visits: one of each call. `make test-all` visits all.
var agentPoints = []string{
	"vm-guest.create.made", "linux.create-container.bundle", "linux.start-container.created", "vm-guest.start.started", "vm-guest.log.sent",
	"vm-guest.exec.ended", "vm-guest.stats.measured", "vm-guest.update.applied", "vm-guest.update-pod.applied", "linux.stop-container.signalled",
	"vm-guest.events.event", "linux.remove-container.deleted", "vm-guest.remove.removed",
}

// TestN1VMOCIAgentKilledAtEveryFailPoint kills tripod-guest in a machine with SIGKILL at each fail point of the calls about a
// container, and lets tripod-init start it again. A call that fails says so with a clear error, and succeeds when it is
// repeated. The container's program starts only once, its log and its exit code are right, and nothing of it is left in the
// guest or on the node. Another container of the pod ticks, and no tick may be missing or doubled in its log.
func TestN1VMOCIAgentKilledAtEveryFailPoint(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCIFailPoints(t))
	pod := d.RunPodWith(t, harness.PodConfig(t, "bystander"), harness.OCIHandler)
	config := harness.ContainerConfig("c", harness.Busybox, harness.Shell("echo start >>/data/starts; i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.1; done"))
	starts := startsOf(t, config)
	bystander := pod.Run(config)
	bystander.WaitLog("tick 1")
	a := &agentKill{d: d, pod: pod, bystander: bystander}
	if err := a.script(t); err != nil {
		t.Fatalf("the script without a kill: %v", err)
	}
	a.before = resources(d)
	names := strings.Fields(bystander.Must("tripod-failpoint", "names"))
	for _, prefix := range []string{linuxSetUp, guestSetUp, guestRemoval} {
		names = without(names, prefix)
	}
	for _, name := range agentPoints {
		if !slices.Contains(names, name) {
			t.Errorf("%s is not a fail point of the guest", name)
		}
	}
	if os.Getenv("TRIPOD_TEST_FULL") == "" {
		names = agentPoints
	} else if len(names) < 20 {
		t.Errorf("fail points found: got %d, want at least 20", len(names))
	}
	for _, point := range names {
		t.Run(point, func(t *testing.T) {
			a.at(t, point)
			if err := errors.Join(recordIsTrue(d), stillTicking(bystander)); err != nil {
				t.Error(err)
			}
			if got := readStarts(t, starts); got != 1 {
				t.Errorf("starts of the bystander: got %d, want 1", got)
			}
		})
	}
}

// agentKill is a machine with a bystander, in which tripod-guest is killed.
type agentKill struct {
	d         *harness.Daemon
	pod       *harness.Pod
	bystander *harness.Container
	before    harness.Resources
	pid       string // of tripod-guest before the kill
}

// at runs the script with tripod-guest killed at a fail point.
func (a *agentKill) at(t *testing.T, point string) {
	t.Helper()
	a.pid = a.guest("pid")
	a.guest("arm", point, "kill") // a fail point of each log's copy kills before the answer
	if err := a.script(t); err != nil {
		t.Error(err)
	}
	if err := a.restarted(); err != nil {
		t.Errorf("the fail point was not passed: %v", err)
	}
	harness.Eventually(t, 10*time.Second, func() error { return a.before.Leaks(resources(a.d)) })
}

// guest gives tripod-guest an order of its build for tests, and returns the answer, or "" if there is none.
func (a *agentKill) guest(order ...string) string {
	resp, err := a.d.CRI().ExecSync(context.Background(), &runtimeapi.ExecSyncRequest{
		ContainerId: a.bystander.ID, Cmd: append([]string{"tripod-failpoint"}, order...), Timeout: 10,
	})
	if err != nil || resp.ExitCode != 0 {
		return ""
	}
	return string(resp.Stdout)
}

// restarted waits until tripod-guest answers again after the kill.
func (a *agentKill) restarted() error {
	return until.Poll(30*time.Second, func() error {
		if pid := a.guest("pid"); pid == "" || pid == a.pid {
			return fmt.Errorf("PID of tripod-guest: got %q, want another one than %q", pid, a.pid)
		}
		return nil
	})
}

// repeat makes a call, and once more if tripod-guest was killed in it.
func (a *agentKill) repeat(t *testing.T, what string, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	began := time.Now()
	err := call(ctx)
	if err == nil {
		return nil
	}
	t.Logf("%s failed after %.1f s: %v", what, time.Since(began).Seconds(), err)
	if code := status.Code(err); code != codes.Unavailable {
		return fmt.Errorf("%s: got error %w, want code Unavailable", what, err)
	}
	if err := a.restarted(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if err := call(ctx); err != nil {
		return fmt.Errorf("%s, repeated: %w", what, err)
	}
	return nil
}

// script makes each call about a container once, in order, and repeats those that fail.
func (a *agentKill) script(t *testing.T) error {
	cri := a.d.CRI()
	config := harness.ContainerConfig("victim", harness.Busybox,
		harness.Shell("echo start >>/data/starts; trap 'echo end; exit 7' TERM; echo begin; while :; do sleep 0.1; done"))
	starts := startsOf(t, config)
	victim := &harness.Container{Config: config, Pod: a.pod}
	steps := []struct {
		name string
		call func(context.Context) error
	}{
		{"CreateContainer", func(ctx context.Context) error {
			resp, err := cri.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: a.pod.ID, Config: config, SandboxConfig: a.pod.Config})
			victim.ID = resp.GetContainerId()
			return err
		}},
		{"StartContainer", func(ctx context.Context) error {
			_, err := cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: victim.ID})
			return err
		}},
		{"ExecSync", func(ctx context.Context) error {
			resp, err := cri.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: victim.ID, Cmd: []string{"sh", "-c", "cat /data/starts; exit 3"}, Timeout: 20})
			if err == nil && (resp.ExitCode != 3 || string(resp.Stdout) != "start\n") {
				err = fmt.Errorf("got exit code %d and output %q, want 3 and the line of the start", resp.ExitCode, resp.Stdout)
			}
			return err
		}},
		{"ContainerStats", func(ctx context.Context) error {
			_, err := cri.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: victim.ID})
			return err
		}},
		{"UpdateContainerResources", func(ctx context.Context) error {
			_, err := cri.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{ContainerId: victim.ID, Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512}})
			return err
		}},
		{"UpdatePodSandboxResources", func(ctx context.Context) error {
			_, err := cri.UpdatePodSandboxResources(ctx, &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: a.pod.ID, Resources: &runtimeapi.LinuxContainerResources{CpuShares: 768}})
			return err
		}},
		{"StopContainer", func(ctx context.Context) error {
			_, err := cri.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: victim.ID, Timeout: 20})
			return err
		}},
	}
	var errs []error
	for _, s := range steps {
		if err := a.repeat(t, s.name, s.call); err != nil {
			errs = append(errs, err)
			break
		}
	}
	if victim.ID == "" {
		return errors.Join(errs...)
	}
	if len(errs) == 0 {
		errs = append(errs, ended(t, victim, starts))
	}
	errs = append(errs, a.repeat(t, "RemoveContainer", func(ctx context.Context) error {
		_, err := cri.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: victim.ID})
		return err
	}))
	harness.Eventually(t, 30*time.Second, func() error {
		if left := a.guest("left", victim.ID); left != "none" {
			return fmt.Errorf("left of the victim in the guest: %q", left)
		}
		return nil
	})
	return errors.Join(errs...)
}

// ended checks a victim that was asked to stop: its program was started once, and its log and its exit code are right.
func ended(t *testing.T, victim *harness.Container, starts string) error {
	var errs []error
	if s := victim.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.ExitCode != stopCode {
		errs = append(errs, fmt.Errorf("the stopped victim: got %s with exit code %d (%s: %s), want exited with %d", s.State, s.ExitCode, s.Reason, s.Message, stopCode))
	}
	if got := readStarts(t, starts); got != 1 {
		errs = append(errs, fmt.Errorf("starts of the victim: got %d, want 1", got))
	}
	if got, want := harness.Text(victim.Logs(), ""), "begin\nend\n"; got != want {
		errs = append(errs, fmt.Errorf("log of the victim: got %q, want %q", got, want))
	}
	return errors.Join(errs...)
}

// startsOf mounts a new directory at a container's /data, and returns the path of the file to which the container's program
// writes a line at each start.
func startsOf(t *testing.T, config *runtimeapi.ContainerConfig) string {
	dir := filepath.Join(t.TempDir(), "data")
	config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: dir}}
	return filepath.Join(dir, "starts")
}

func readStarts(t *testing.T, path string) int {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	return strings.Count(string(data), "\n")
}
