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
			if mode != "node" {
				needsFull(t)
			}
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

// TestSuiteOfComponentsInLinuxPods runs the suite of all backends with pods of the handler linux whose containers are
// components, including kills of the daemon.
func TestSuiteOfComponentsInLinuxPods(t *testing.T) {
	needsFull(t)
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	for _, image := range []string{harness.CommandGo, harness.UnknownImportWasm} {
		d.Pull(t, image)
	}
	sandboxtest.Run(t, sandboxtest.Subject{
		Conn:    func() *grpc.ClientConn { return d.Conn() },
		Handler: "linux",
		Pod: func(c *runtimeapi.PodSandboxConfig) {
			full := harness.PodConfig(t, c.Metadata.Name)
			c.LogDirectory, c.Linux = full.LogDirectory, full.Linux
		},
		Container: func(c *runtimeapi.ContainerConfig, w sandboxtest.Workload) {
			component(c, w)
			if w == sandboxtest.Runs { // not a server, because the containers of a pod share its ports
				c.Image.Image, c.Args, c.Stdin = harness.CommandGo, []string{"stdin"}, true
			}
		},
		Restart: func(testing.TB) { d.Kill(); d.Start() },
	})
}
