package kubelet

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// burstTimeout limits a burst on a busy machine. It is not a performance goal. Performance is measured by hand, on
// a quiet machine, with the lines that the test logs.
const burstTimeout = 10 * time.Minute

// TestBurst scales Deployments from zero to many pods and back, while busy loops run. All pods become ready, none is
// restarted, nothing is left.
func TestBurst(t *testing.T) {
	c := kube.Shared(t)
	for _, burst := range []struct {
		crowd
		times, loops int
	}{{linuxCrowd, 1, 0}, {wasmCrowd, 3, 6}, {vmCrowd, 6, 0}} {
		t.Run(burst.kind, func(t *testing.T) {
			n := c.Namespace(t)
			n.Apply(burst.deployment())
			keepBusy(t, burst.loops)
			for range burst.times {
				up := scale(n, burst.pods)
				n.CheckRestarts()
				t.Logf("%d pods of %s with %d busy loops: ready after %.1f s, removed after %.1f s", burst.pods, burst.kind, burst.loops, up,
					scale(n, 0))
			}
		})
	}
}

// crowd is a Deployment "many" of small pods.
type crowd struct {
	kind, image, resources string
	pods                   int
}

var (
	linuxCrowd = crowd{"linux", harness.Pause, "{}", 100}
	wasmCrowd  = crowd{"wasm", harness.GreeterC, "{}", 100}
	vmCrowd    = crowd{"vm", harness.TinyGuest, "{limits: {memory: 32Mi}}", 10}
)

// deployment returns the Deployment without pods.
func (c crowd) deployment() string {
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: many}
spec:
  replicas: 0
  selector: {matchLabels: {app: many}}
  template:
    metadata: {labels: {app: many}}
    spec:
      runtimeClassName: %s
      terminationGracePeriodSeconds: 2
      containers: [{name: c, image: %s, resources: %s}]
`, c.kind, c.image, c.resources)
}

// scale sets the number of pods of the Deployment "many" and returns the seconds until all are ready or removed.
func scale(n *kube.Namespace, pods int) float64 {
	begin := time.Now()
	n.Kubectl("scale", "deployment/many", fmt.Sprint("--replicas=", pods))
	n.WaitPods("app=many", pods, burstTimeout)
	return time.Since(begin).Seconds()
}

// keepBusy runs busy loops until the test ends.
func keepBusy(t *testing.T, loops int) {
	t.Helper()
	for range loops {
		loop := exec.Command("sh", "-c", "while :; do :; done")
		if err := loop.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = loop.Process.Kill()
			_ = loop.Wait() // the error is the signal
		})
	}
}
