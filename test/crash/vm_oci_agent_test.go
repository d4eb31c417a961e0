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
	// linuxSetUp and guestSetUp begin the names of the guest's fail points that are passed before a pod has containers.
	linuxSetUp, guestSetUp = "linux.create-sandbox.", "vm-guest.set-up."
	// guestRemoval is never passed in a guest, whose machine is killed instead.
	guestRemoval = "linux.remove-sandbox."
	// stopCode is the exit code of a victim that was asked to stop.
	stopCode = 7
)

// setUpPoints are those of the guest's fail points that are passed before a pod has containers. `make test` visits the first.
var setUpPoints = []string{
	guestSetUp + "recorded", guestSetUp + "made", linuxSetUp + "dir", linuxSetUp + "namespaces", linuxSetUp + "cgroup", linuxSetUp + "pause",
}

// agentCalls are the calls of agentKill's script, with the beginnings of the names of the guest's fail points that it passes. A
// fail point of the logs is passed at any time, because a bystander ticks.
var agentCalls = []struct {
	call   string
	points []string
}{
	{"CreateContainer", []string{"vm-guest.create.", "linux.create-container."}},
	{"StartContainer", []string{"vm-guest.start.", "linux.start-container.", "vm-guest.log."}},
	{"ExecSync", []string{"vm-guest.exec."}},
	{"ContainerStats", []string{"vm-guest.stats."}},
	{"UpdateContainerResources", []string{"vm-guest.update."}},
	{"UpdatePodSandboxResources", []string{"vm-guest.update-pod."}},
	{"StopContainer", []string{"linux.stop-container.", "vm-guest.stop.", "vm-guest.events."}},
	{"RemoveContainer", []string{"vm-guest.remove.", "linux.remove-container."}},
}

// TestN1VMOCIAgentKilledAtEveryFailPoint kills tripod-guest in a machine with SIGKILL at each fail point of the calls about a
// container, and lets tripod-init start it again. A call that fails says so with a clear error, and succeeds when it is
// repeated. The container's program starts only once, its log and its exit code are right, and nothing of it is left in the
// guest or on the node. Another container of the pod ticks, and no tick may be missing or doubled in its log.
//
// A round visits one fail point of each call. `make test` has two rounds, `make test-all` as many as the call with the most.
func TestN1VMOCIAgentKilledAtEveryFailPoint(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCIFailPoints(t))
	pod := d.RunPodWith(t, harness.PodConfig(t, "bystander"), harness.OCIHandler)
	config := harness.ContainerConfig("c", harness.Busybox,
		harness.Shell("echo start >>/data/starts; i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.1; done"))
	starts := startsOf(t, config)
	bystander := pod.Run(config)
	bystander.WaitLog("tick 1")
	a := &agentKill{d: d, pod: pod, bystander: bystander}
	if err := a.script(t, nil); err != nil {
		t.Fatalf("the script without a kill: %v", err)
	}
	before := resources(d)
	rounds := roundsOf(t, strings.Fields(bystander.Must("tripod-failpoint", "names")))
	if os.Getenv("TRIPOD_TEST_FULL") == "" {
		rounds = rounds[:2]
	}
	for i, points := range rounds {
		t.Run(fmt.Sprint("round", i+1), func(t *testing.T) {
			err := errors.Join(a.script(t, points), recordIsTrue(d), stillTicking(bystander))
			if err != nil {
				t.Error(err)
			}
			if got := readStarts(t, starts); got != 1 {
				t.Errorf("starts of the bystander: got %d, want 1", got)
			}
			harness.Eventually(t, 10*time.Second, func() error { return before.Leaks(resources(d)) })
		})
	}
	points := setUpPoints
	if os.Getenv("TRIPOD_TEST_FULL") == "" {
		points = points[:1]
	}
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			killedInSetUp(t, d, point)
			if err := errors.Join(recordIsTrue(d), stillTicking(bystander)); err != nil {
				t.Error(err)
			}
			removeVictims(t, d, pod.ID)
			harness.Eventually(t, 10*time.Second, func() error { return before.Leaks(resources(d)) })
		})
	}
}

// killedInSetUp runs a pod whose guest has tripod-guest killed while it prepares the guest for the pod. The pod and a container
// in it must run nevertheless, because the next tripod-guest can complete the pod.
func killedInSetUp(t *testing.T, d *harness.Daemon, point string) {
	t.Helper()
	config := harness.PodConfig(t, "victim", harness.Namespaces(func(n *runtimeapi.NamespaceOption) { n.Pid = runtimeapi.NamespaceMode_POD }))
	config.Annotations = map[string]string{"test/failpoints": point + "=kill"}
	pod := d.RunPodWith(t, config, harness.OCIHandler)
	container := harness.ContainerConfig("c", harness.Busybox, harness.Shell("echo begin; exit 5"))
	container.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
	sleeper := pod.Run(harness.ContainerConfig("sleeper", harness.Busybox, harness.Sleep()))
	if got := sleeper.Must("tripod-failpoint", "starts"); got == "1" {
		t.Errorf("starts of tripod-guest: got %s; the fail point was not passed", got)
	}
	c := pod.Run(container)
	c.WaitExit(5)
	if got := harness.Text(c.Logs(), ""); got != "begin\n" {
		t.Errorf("log: got %q, want one line", got)
	}
}

// roundsOf returns the fail points for the calls of each round, by the names of the calls.
func roundsOf(t *testing.T, names []string) (rounds []map[string]string) {
	t.Helper()
	names = slices.DeleteFunc(names, func(name string) bool { // the store of a node's images is linked in, but not used
		return !strings.HasPrefix(name, "linux.") && !strings.HasPrefix(name, "vm-guest.")
	})
	for _, prefix := range []string{linuxSetUp, guestSetUp, guestRemoval} {
		names = without(names, prefix)
	}
	for _, c := range agentCalls {
		i := 0
		for _, prefix := range c.points {
			for _, name := range names {
				if !strings.HasPrefix(name, prefix) {
					continue
				}
				if i == len(rounds) {
					rounds = append(rounds, map[string]string{})
				}
				rounds[i][c.call] = name
				i++
			}
			names = without(names, prefix)
		}
		if i == 0 {
			t.Errorf("%s passes no fail point of the guest", c.call)
		}
	}
	if len(names) > 0 || len(rounds) < 2 {
		t.Fatalf("fail points of the guest that no call passes: %q; rounds: got %d, want at least 2", names, len(rounds))
	}
	return rounds
}

// agentKill is a machine with a bystander, in which tripod-guest is killed.
type agentKill struct {
	d         *harness.Daemon
	pod       *harness.Pod
	bystander *harness.Container
	runs      int    // of the script
	pid       string // of tripod-guest before the kill
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

// visit makes a call with tripod-guest killed at a fail point, unless that is "". It repeats the call if it has failed.
func (a *agentKill) visit(t *testing.T, what, point string, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if point != "" {
		a.pid = a.guest("pid")
		a.guest("arm", point, "kill") // a fail point of the logs kills before the answer
	}
	began := time.Now()
	failed := call(ctx)
	t.Logf("%s with a kill at %q: error %v after %.1f s", what, point, failed, time.Since(began).Seconds())
	if code := status.Code(failed); failed != nil && (point == "" || code != codes.Unavailable) {
		return fmt.Errorf("%s with a kill at %q: got error %w, want none or one with the code Unavailable", what, point, failed)
	}
	if point == "" {
		return nil
	}
	if err := a.restarted(); err != nil {
		return fmt.Errorf("%s with a kill at %q: %w", what, point, err)
	}
	if failed == nil {
		return nil
	}
	if err := call(ctx); err != nil {
		return fmt.Errorf("%s, repeated after a kill at %q: %w", what, point, err)
	}
	return nil
}

// script makes each call about a container once, in order, with tripod-guest killed at the call's fail point.
func (a *agentKill) script(t *testing.T, points map[string]string) error {
	cri := a.d.CRI()
	a.runs++
	config := harness.ContainerConfig("victim", harness.Busybox,
		harness.Shell("echo start >>/data/starts; trap 'echo end; exit 7' TERM; echo begin; while :; do sleep 0.1; done"))
	config.LogPath = fmt.Sprintf("victim-%d.log", a.runs)
	starts := startsOf(t, config)
	victim := &harness.Container{Config: config, Pod: a.pod}
	steps := []struct {
		name string
		call func(context.Context) error
	}{
		{"CreateContainer", func(ctx context.Context) error {
			resp, err := cri.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
				PodSandboxId: a.pod.ID, Config: config, SandboxConfig: a.pod.Config,
			})
			victim.ID = resp.GetContainerId()
			return err
		}},
		{"StartContainer", func(ctx context.Context) error {
			_, err := cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: victim.ID})
			return err
		}},
		{"ExecSync", func(ctx context.Context) error {
			resp, err := cri.ExecSync(ctx, &runtimeapi.ExecSyncRequest{
				ContainerId: victim.ID, Cmd: []string{"sh", "-c", "cat /data/starts; sleep 1; exit 3"}, Timeout: 20,
			})
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
			_, err := cri.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{
				ContainerId: victim.ID, Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512},
			})
			return err
		}},
		{"UpdatePodSandboxResources", func(ctx context.Context) error {
			_, err := cri.UpdatePodSandboxResources(ctx, &runtimeapi.UpdatePodSandboxResourcesRequest{
				PodSandboxId: a.pod.ID, Resources: &runtimeapi.LinuxContainerResources{CpuShares: 768},
			})
			return err
		}},
		{"StopContainer", func(ctx context.Context) error {
			_, err := cri.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: victim.ID, Timeout: 20})
			return err
		}},
	}
	var errs []error
	for _, s := range steps {
		if err := a.visit(t, s.name, points[s.name], s.call); err != nil {
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
	errs = append(errs, a.visit(t, "RemoveContainer", points["RemoveContainer"], func(ctx context.Context) error {
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
		errs = append(errs, fmt.Errorf("the stopped victim: got %s with exit code %d (%s: %s), want exited with %d",
			s.State, s.ExitCode, s.Reason, s.Message, stopCode))
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
