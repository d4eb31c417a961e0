package e2e

import (
	"testing"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/sandboxtest"
)

// slowBoot delays the start of every machine, so that the suite observes the state Starting.
const slowBoot = "TRIPOD_FAILPOINTS=vm.start-container.opened=delay(300ms)"

// TestVMSuite runs the suite of all backends, with the 49 cells of the state table, with machines in QEMU, including
// kills of the daemon. The guests are boot sectors, because the suite tests machines rather than kernels.
func TestVMSuite(t *testing.T) {
	d := harness.NewDaemon(t, harness.VM(t), harness.Set("vm.default_memory", 32<<20))
	d.Start(slowBoot)
	for _, image := range []string{harness.TinyGuest, harness.TinyEnds, harness.TinyDeaf, harness.Busybox} {
		d.Pull(t, image)
	}
	sandboxtest.Run(t, sandboxtest.Subject{
		Conn:    func() *grpc.ClientConn { return d.Conn() },
		Handler: "vm", Unit: true, Machines: true,
		Pod: func(c *runtimeapi.PodSandboxConfig) {
			c.LogDirectory = harness.PodConfig(t, c.Metadata.Name).LogDirectory
		},
		Container: func(c *runtimeapi.ContainerConfig, w sandboxtest.Workload) {
			c.Image.Image = map[sandboxtest.Workload]string{
				sandboxtest.Runs: harness.TinyGuest, sandboxtest.Slow: harness.TinyGuest, sandboxtest.Ends: harness.TinyEnds,
				sandboxtest.Deaf: harness.TinyDeaf, sandboxtest.Fails: harness.Busybox, // which has no disk
			}[w]
		},
		Restart: func(testing.TB) { d.Kill(); d.Start(slowBoot) },
	})
}
