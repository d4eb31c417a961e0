package e2e

import (
	"strconv"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// componentUnits are pods of components: one that serves, and a command that ends with a code.
var componentUnits = unitKind{
	handler: "wasm", image: harness.CommandGo,
	runs: func(c *runtimeapi.ContainerConfig) { c.Args = []string{"sleep", "1h"} },
	ends: func(c *runtimeapi.ContainerConfig, code int) { c.Args = []string{"exit", strconv.Itoa(code)} },
}

// TestKubeletWasmPods plays what happens to unit pods over components, whoever shares a worker.
func TestKubeletWasmPods(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) { playUnits(t, harness.StartDaemon(t, harness.Wasm(t, mode)), componentUnits) })
	}
}

// TestKubeletWasmServer is a Deployment of a component: the kubelet sends all that it sends to any pod, probes over TCP,
// and the component answers until it is ended. It is in a namespace of the restricted level, which wants a user that is not root.
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
		t.Errorf("after its termination: %v", st)
	}
	k.remove(p)
}
