package e2e

import (
	"testing"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/sandboxtest"
)

// slowStart delays the start of every component pod, so that the suite observes the state Starting.
const slowStart = "TRIPOD_FAILPOINTS=wasm.start-container.opened=delay(300ms)"

// TestWasmSuite runs the suite of all backends, with the 49 cells of the state table, with component pods, for each way
// to share workers, including kills of the daemon.
func TestWasmSuite(t *testing.T) {
	for _, mode := range []string{"node", "namespace", "pod"} {
		t.Run(mode, func(t *testing.T) {
			d := harness.NewDaemon(t, harness.Wasm(t, mode))
			d.Start(slowStart)
			for _, image := range []string{harness.GreeterC, harness.CommandGo, harness.UnknownImportWasm} {
				d.Pull(t, image)
			}
			sandboxtest.Run(t, sandboxtest.Subject{
				Conn:    func() *grpc.ClientConn { return d.Conn() },
				Handler: "wasm", Unit: true,
				Pod: func(c *runtimeapi.PodSandboxConfig) {
					c.LogDirectory = harness.PodConfig(t, c.Metadata.Name).LogDirectory
				},
				Container: component,
				Restart:   func(testing.TB) { d.Kill(); d.Start(slowStart) },
			})
		})
	}
}

// component configures the suite's component pods.
func component(c *runtimeapi.ContainerConfig, w sandboxtest.Workload) {
	c.Image.Image = map[sandboxtest.Workload]string{
		sandboxtest.Runs: harness.GreeterC, sandboxtest.Slow: harness.GreeterC, sandboxtest.Fails: harness.UnknownImportWasm,
		sandboxtest.Ends: harness.CommandGo, sandboxtest.Deaf: harness.CommandGo,
	}[w]
	c.Args = map[sandboxtest.Workload][]string{
		sandboxtest.Ends: {"exit", "7"}, sandboxtest.Deaf: {"sleep", "1h"},
	}[w]
}
