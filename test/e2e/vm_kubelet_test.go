package e2e

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// machineUnits are pods of machines. Their own end has no code but 0, so what fails by itself is not played.
var machineUnits = unitKind{handler: "vm", image: harness.TinyGuest, runs: func(*runtimeapi.ContainerConfig) {}}

// TestKubeletVMPods plays what happens to unit pods over machines.
func TestKubeletVMPods(t *testing.T) {
	d := tinyVM(t)
	for name, test := range map[string]func(*testing.T, *kubelet, unitKind){
		"Deployment": unitDeployment, "killed sandbox": unitKilledSandbox, "daemon's return": unitDaemonReturns,
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t, d)
			test(t, k, machineUnits)
			newKubelet(t, d).relist()
		})
	}
}
