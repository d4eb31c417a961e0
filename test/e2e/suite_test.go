package e2e

import (
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/sandboxtest"
	"github.com/tripod-run/tripod/test/until"
)

// TestSuite runs the suite of all backends with real containers and both OCI runtimes, including kills of the daemon.
func TestSuite(t *testing.T) {
	for _, runtime := range []string{"crun", "runc"} {
		t.Run(runtime, func(t *testing.T) {
			if runtime != "crun" {
				needsFull(t)
			}
			d := harness.StartDaemon(t, harness.Set("linux.runtime", runtime))
			image := d.Pull(t, harness.Busybox)
			sandboxtest.Run(t, sandboxtest.Subject{
				Conn:    func() *grpc.ClientConn { return d.Conn() },
				Handler: "linux",
				Pod: func(c *runtimeapi.PodSandboxConfig) {
					full := harness.PodConfig(t, c.Metadata.Name)
					c.LogDirectory, c.Linux = full.LogDirectory, full.Linux
					c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_CONTAINER // the kubelet's default
				},
				Container: func(c *runtimeapi.ContainerConfig, w sandboxtest.Workload) { workload(c, image, w) },
				Deafened:  awaitDeaf,
				Restart:   func(testing.TB) { d.Kill(); d.Start() },
			})
		})
	}
}

// needsFull skips a repetition of the state table, which takes most of a minute. `make test` has it once for each kind
// of pod.
func needsFull(t *testing.T) {
	t.Helper()
	if os.Getenv("TRIPOD_TEST_FULL") == "" {
		t.Skip("make test has the state table once for each kind of pod: make test-all repeats it in each mode (TRIPOD_TEST_FULL=1)")
	}
}

// workload configures the suite's containers, which run shell scripts in busybox.
func workload(c *runtimeapi.ContainerConfig, image string, w sandboxtest.Workload) {
	c.Image.Image = image
	c.Command = map[sandboxtest.Workload][]string{
		sandboxtest.Runs:  {"sh", "-c", "trap 'exit 0' TERM; sleep 3600 & wait"},
		sandboxtest.Ends:  {"sh", "-c", "exit 7"},
		sandboxtest.Fails: {"/no/such/program"},
		sandboxtest.Deaf:  {"sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1; done"},
	}[w]
}

// awaitDeaf waits until the workload Deaf has set its trap. Before that the OCI runtime's init, and then the shell, end by
// the signal.
func awaitDeaf(t testing.TB, log string) {
	t.Helper()
	until.Holds(t, "the container is deaf", func() bool {
		text, err := os.ReadFile(log)
		return err == nil && strings.Contains(string(text), "deaf")
	})
}
