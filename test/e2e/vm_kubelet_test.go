package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// machineUnits are pods with machines. Machines that end by themselves always have code 0, so scenarios with failures
// are left out.
var machineUnits = unitKind{handler: "vm", image: harness.TinyGuest, runs: func(*runtimeapi.ContainerConfig) {}}

// machineRestarts: a machine that turns itself off is restarted, each attempt with its own console. The end of the last
// attempt (lastState) and its log (`kubectl logs --previous`) are available, even after SIGKILL of the daemon.
func machineRestarts(t *testing.T, k *kubelet, _ unitKind) {
	ends := unitKind{handler: "vm", image: harness.TinyEnds}
	p := k.unitPod("unit-ends", ends, func(*runtimeapi.ContainerConfig, int) {})
	seen := map[uint32]bool{}
	hasEnded := func(s *podStatus) {
		for _, c := range s.containers {
			if c.State != exited {
				continue
			}
			seen[c.Metadata.Attempt] = true
			if c.ExitCode != 0 || c.Reason != "Completed" || c.FinishedAt < c.StartedAt {
				t.Errorf("status of attempt %d: got %v, want Completed with code 0", c.Metadata.Attempt, c)
			}
			log := harness.Text(harness.ReadLog(t, c.LogPath), "stdout")
			if want := fmt.Sprintf("%d.log", c.Metadata.Attempt); filepath.Base(c.LogPath) != want || strings.Count(log, "tick 00001") != 1 ||
				strings.Contains(log, "tick 00002") {
				t.Errorf("log of attempt %d: got %q in %s, want tick 00001 once in %s", c.Metadata.Attempt, log, c.LogPath, want)
			}
		}
	}
	k.wait(p, func(s *podStatus) error {
		k.must(s.isUnit())
		hasEnded(s)
		if len(s.containers) < 2 || s.containers[0].Metadata.Attempt < 3 {
			return fmt.Errorf("want two containers or more, the newest at attempt 3 or later, got %v", s)
		}
		return nil
	})
	for attempt := range uint32(3) {
		if !seen[attempt] {
			t.Errorf("attempt %d was never reported as exited", attempt)
		}
	}
	before := k.status(p)
	k.d.Kill()
	k.d.Start()
	again := newKubelet(t, k.d)
	after := again.status(p)
	hasEnded(after)
	if after.of(p.containers[0]) == nil || len(after.containers) != len(before.containers) ||
		after.containers[1].Id != before.containers[1].Id {
		t.Errorf("status after the daemon's restart: got %v, want %v", after, before)
	}
	k.runtime, k.images = again.runtime, again.images
}

// TestKubeletVMPods runs the scenarios of unit pods with machines.
func TestKubeletVMPods(t *testing.T) {
	d := tinyVM(t)
	for name, test := range map[string]func(*testing.T, *kubelet, unitKind){
		"Deployment": unitDeployment, "killed sandbox": unitKilledSandbox, "daemon's return": unitDaemonReturns,
		"restarts": machineRestarts,
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t, d)
			test(t, k, machineUnits)
			newKubelet(t, d).relist()
		})
	}
}
