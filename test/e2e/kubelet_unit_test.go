package e2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// unitKind describes a kind of unit pods for the model of the kubelet.
type unitKind struct {
	handler, image string
	// runs configures a container that runs until it is stopped, ends one that exits with a code soon after its start.
	runs func(*runtimeapi.ContainerConfig)
	ends func(c *runtimeapi.ContainerConfig, code int)
}

// fakeUnits are the unit pods of the fake backend, whose behaviour is set by annotations.
var fakeUnits = unitKind{
	handler: "fake-unit", image: harness.Busybox,
	runs: func(*runtimeapi.ContainerConfig) {},
	ends: func(c *runtimeapi.ContainerConfig, code int) {
		c.Annotations["fake.tripod.dev/exit-after"], c.Annotations["fake.tripod.dev/exit-code"] = "20ms", strconv.Itoa(code)
	},
}

// TestKubeletUnitPods runs the scenarios of unit pods.
func TestKubeletUnitPods(t *testing.T) {
	playUnits(t, harness.StartDaemon(t, harness.Fake()), fakeUnits)
}

func playUnits(t *testing.T, d *harness.Daemon, kind unitKind) {
	for name, test := range map[string]func(*testing.T, *kubelet, unitKind){
		"Deployment":      unitDeployment,
		"crash loop":      unitCrashLoop,
		"late Secret":     unitSecretComesLate,
		"second one":      unitSecond,
		"Job":             unitJob,
		"failed Job":      unitFailedJob,
		"killed sandbox":  unitKilledSandbox,
		"daemon's return": unitDaemonReturns,
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t, d)
			test(t, k, kind)
			newKubelet(t, d).relist()
		})
	}
}

// unitPod returns a pod with one container. how configures each attempt.
func (k *kubelet) unitPod(name string, kind unitKind, how func(c *runtimeapi.ContainerConfig, attempt int)) *kubePod {
	k.t.Helper()
	p := k.newPod(name, &kubeContainer{name: "c", image: kind.image,
		change: func(c *runtimeapi.ContainerConfig) { how(c, int(c.Metadata.Attempt)) }})
	p.handler, p.grace = kind.handler, 5
	return p
}

// isUnit returns an error unless the pod has one sandbox, all attempts of its container except the newest have ended,
// and all IDs differ, because a kubelet keeps containers and sandboxes in one map.
func (s *podStatus) isUnit() error {
	if len(s.sandboxes) != 1 || len(s.containers) == 0 {
		return fmt.Errorf("got sandboxes %v, containers %v; want one unit pod", s.sandboxes, s.containers)
	}
	ids := map[string]bool{s.sandboxes[0].Id: true}
	for i, c := range s.containers {
		if ids[c.Id] || i > 0 && c.State != exited {
			return fmt.Errorf("got sandboxes %v, containers %v; want one unit pod", s.sandboxes, s.containers)
		}
		ids[c.Id] = true
	}
	return nil
}

// unitDeployment tests a pod that runs until it is deleted.
func unitDeployment(t *testing.T, k *kubelet, kind unitKind) {
	p := k.unitPod("unit", kind, func(c *runtimeapi.ContainerConfig, _ int) { kind.runs(c) })
	s := k.states(p, "c running")
	k.must(s.isUnit())
	if again := k.states(p, "c running"); again.of(p.containers[0]).StartedAt != s.of(p.containers[0]).StartedAt {
		t.Errorf("the sync changed a pod that needs no change: %v", again.containers)
	}
	p.deleted = true
	k.sync(p, k.status(p))
	if s := k.status(p); s.state(p.containers[0]) != "exited" || s.of(p.containers[0]).Reason == "" {
		t.Errorf("containers after the termination: got %v, want exited with a reason", s.containers)
	}
	k.remove(p)
}

// unitCrashLoop: each attempt runs in the same pod with the same address and its own log. The end of the previous
// attempt is available to `kubectl get` (lastState) and `kubectl logs --previous` until garbage collection.
func unitCrashLoop(t *testing.T, k *kubelet, kind unitKind) {
	p := k.unitPod("unit-crash", kind, func(c *runtimeapi.ContainerConfig, attempt int) {
		if kind.runs(c); attempt < 3 {
			kind.ends(c, 4)
		}
	})
	var ip string
	s := k.wait(p, func(s *podStatus) error {
		k.must(s.isUnit())
		if ip == "" {
			ip = s.sandbox().GetNetwork().GetIp()
		}
		if c := s.containers[0]; c.State == exited && (c.ExitCode != 4 || c.Reason != "Error") {
			t.Errorf("status of attempt %d: got %v, want exit code 4, reason Error", c.Metadata.Attempt, c)
		}
		if c := s.containers[0]; c.State != running || c.Metadata.Attempt != 3 {
			return fmt.Errorf("container: got %v, want attempt 3 running", c)
		}
		return nil
	})
	if now := s.sandbox().GetNetwork().GetIp(); now != ip {
		t.Errorf("address after the restarts: got %s, want %s", now, ip)
	}
	if len(s.containers) != 2 {
		t.Fatalf("attempts after garbage collection: got %v, want 2", s.containers)
	}
	last := s.containers[1]
	if last.State != exited || last.Metadata.Attempt != 2 || last.ExitCode != 4 || last.Reason != "Error" ||
		last.FinishedAt > s.containers[0].CreatedAt {
		t.Errorf("previous attempt: got %v, want attempt 2, exited with code 4", last)
	}
	if _, err := os.Stat(last.LogPath); err != nil || last.LogPath == s.containers[0].LogPath {
		t.Errorf("log of the previous attempt: %v", err)
	}
}

// unitSecretComesLate: a relist sees only the sandbox of a pod whose container cannot be created yet. A later relist
// still notices the container's start.
func unitSecretComesLate(t *testing.T, k *kubelet, kind unitKind) {
	p := k.unitPod("unit-secret", kind, func(c *runtimeapi.ContainerConfig, _ int) { kind.runs(c) })
	there := p.containers
	p.containers = nil
	for range 3 {
		k.sync(p, k.cached(p))
	}
	if s := k.cached(p); s.sandbox() == nil || len(s.containers) > 0 {
		t.Fatalf("cached status before the Secret: got %v, want only a sandbox", s)
	}
	p.containers = there
	k.states(p, "c running")
}

// unitSecond: a second container is refused with a reason, and the first keeps running.
func unitSecond(t *testing.T, k *kubelet, kind unitKind) {
	p := k.unitPod("unit-second", kind, func(c *runtimeapi.ContainerConfig, _ int) { kind.runs(c) })
	s := k.states(p, "c running")
	debugger := k.containerConfig(p, &kubeContainer{name: "debugger", image: kind.image}, k.ensureImage(kind.image), 0)
	_, err := k.runtime.CreateContainer(context.Background(), s.sandbox().Id, debugger, k.sandboxConfig(p, 0))
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "has one container") {
		t.Errorf("CreateContainer of a second container: got error %v, want Unimplemented", err)
	}
	if again := k.states(p, "c running"); again.of(p.containers[0]).StartedAt != s.of(p.containers[0]).StartedAt {
		t.Errorf("status after the refusal: got %v, want the same start", again)
	}
}

// unitJob tests a pod that fails once and then completes. It is stopped, kept for its exit code, and removed after its
// deletion.
func unitJob(t *testing.T, k *kubelet, kind unitKind) {
	p := k.unitPod("unit-job", kind, func(c *runtimeapi.ContainerConfig, attempt int) { kind.ends(c, max(0, 1-attempt)) })
	p.restart = restartOnFailure
	k.wait(p, func(s *podStatus) error {
		if c := s.of(p.containers[0]); s.sandbox() != nil || c == nil || c.State != exited || c.Metadata.Attempt != 1 || c.ExitCode != 0 ||
			c.Reason != "Completed" {
			return fmt.Errorf("want the second attempt Completed with code 0 and no running sandbox, got %v", s)
		}
		return s.isUnit()
	})
	k.sync(p, k.status(p))
	if s := k.status(p); s.isUnit() != nil || s.of(p.containers[0]).ExitCode != 0 {
		t.Errorf("status of the completed Job after another sync: got %v, want exit code 0", s)
	}
	k.remove(p)
}

// unitFailedJob tests that a failed Job is not run again.
func unitFailedJob(t *testing.T, k *kubelet, kind unitKind) {
	p := k.unitPod("unit-failed", kind, func(c *runtimeapi.ContainerConfig, _ int) { kind.ends(c, 3) })
	p.restart = restartNever
	k.wait(p, func(s *podStatus) error {
		if c := s.of(p.containers[0]); s.sandbox() != nil || c == nil || c.ExitCode != 3 || c.Metadata.Attempt != 0 {
			return fmt.Errorf("want the first attempt exited with code 3 and no running sandbox, got %v", s)
		}
		return s.isUnit()
	})
	k.remove(p)
}

// unitKilledSandbox: if another client stops a sandbox, the pod gets a new one. The last dead container is kept with
// its sandbox. The one before is removed with its sandbox, because its container cannot be removed alone.
func unitKilledSandbox(t *testing.T, k *kubelet, kind unitKind) {
	p := k.unitPod("unit-killed", kind, func(c *runtimeapi.ContainerConfig, _ int) { kind.runs(c) })
	var ids []string
	for range 3 {
		s := k.wait(p, func(s *podStatus) error {
			if sandbox := s.sandbox(); sandbox == nil || slices.Contains(ids, sandbox.Id) || s.state(p.containers[0]) != "running" {
				return fmt.Errorf("want the container running in another sandbox than %v, got %v", ids, s)
			}
			return nil
		})
		ids = append(ids, s.sandbox().Id)
		k.must(k.runtime.StopPodSandbox(context.Background(), s.sandbox().Id))
	}
	k.wait(p, func(s *podStatus) error {
		var left []string
		for _, sandbox := range s.sandboxes {
			left = append(left, sandbox.Id)
		}
		if s.state(p.containers[0]) != "running" || len(left) != 2 || left[1] != ids[2] {
			return fmt.Errorf("sandboxes: got %q, of which %q were stopped; status %v", left, ids, s)
		}
		return nil
	})
}

// unitDaemonReturns: after a SIGKILL of the daemon, nothing has changed for the kubelet.
func unitDaemonReturns(t *testing.T, k *kubelet, kind unitKind) {
	p := k.unitPod("unit-stays", kind, func(c *runtimeapi.ContainerConfig, _ int) { kind.runs(c) })
	before := k.states(p, "c running")
	k.d.Kill()
	k.d.Start()
	again := newKubelet(t, k.d)
	after := again.states(p, "c running")
	if after.String() != before.String() {
		t.Errorf("status after the restart: got %v, want %v", after, before)
	}
	k.runtime, k.images = again.runtime, again.images
}

// String formats the fields that must not change as long as nothing happens to the pod.
func (s *podStatus) String() string {
	text := ""
	for _, sandbox := range s.sandboxes {
		text += fmt.Sprintf("sandbox %s %s %s; ", sandbox.Id, sandbox.State, sandbox.GetNetwork().GetIp())
	}
	for _, c := range s.containers {
		text += fmt.Sprintf("container %s attempt %d %s started %d code %d %s; ", c.Id, c.Metadata.Attempt, c.State, c.StartedAt, c.ExitCode,
			c.Reason)
	}
	return text
}
