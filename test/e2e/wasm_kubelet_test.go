package e2e

import (
	"strconv"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// componentUnits are pods with components: a server, and a command that exits with a code.
var componentUnits = unitKind{
	handler: "wasm", image: harness.CommandGo,
	runs: func(c *runtimeapi.ContainerConfig) { c.Args = []string{"sleep", "1h"} },
	ends: func(c *runtimeapi.ContainerConfig, code int) { c.Args = []string{"exit", strconv.Itoa(code)} },
}

// TestKubeletWasmPods runs the scenarios of unit pods with components, for each way to share workers.
func TestKubeletWasmPods(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) { playUnits(t, harness.StartDaemon(t, harness.Wasm(t, mode)), componentUnits) })
	}
}

// TestKubeletWasmServer tests a Deployment of a component. The kubelet sends its usual requests and probes over TCP,
// and the component answers until it is stopped. The namespace has the level restricted, which requires a user other
// than root.
func TestKubeletWasmServer(t *testing.T) {
	k := newKubelet(t, harness.StartDaemon(t, harness.Wasm(t, "node")))
	p := k.unitPod("server", unitKind{handler: "wasm", image: harness.GreeterC}, func(*runtimeapi.ContainerConfig, int) {})
	p.restricted = true
	s := k.states(p, "c running")
	ip := s.sandbox().GetNetwork().GetIp()
	dial(t, ip, greeter).call(greeter+"/SayHello", `{"name":"Ada"}`)
	p.deleted = true
	k.sync(p, k.status(p))
	if st := k.status(p).of(p.containers[0]); st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("status after the termination: got %v, want Completed with code 0", st)
	}
	k.remove(p)
}
