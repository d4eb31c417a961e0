package crash

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// ociPoints are the fail points of machines that run containers that `make test` visits; `make test-all` visits all.
var ociPoints = []string{"vm-oci.create-sandbox.booted", "vm-oci.start-container.intent", "vm-oci.stop-sandbox.killed"}

// TestN1VMOCIKilledAtEveryFailPoint is TestN1KilledAtEveryFailPoint for containers in machines: a crash interrupts the
// handling of shares, disks of images, logs and the calls to the guest. A container in another machine ticks, and no tick
// may be missing or doubled in its log.
func TestN1VMOCIKilledAtEveryFailPoint(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	pod := d.RunPodWith(t, harness.PodConfig(t, "bystander"), harness.OCIHandler)
	bystander := pod.Run(harness.ContainerConfig("c", harness.Busybox,
		harness.Shell("i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.1; done")))
	bystander.WaitLog("tick 1")
	victim := func() (*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig) {
		container := harness.ContainerConfig("c", harness.Busybox, harness.Sleep())
		// its machine grows
		container.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 300 << 20, CpuQuota: 200_000, CpuPeriod: 100_000}
		container.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: filepath.Join(t.TempDir(), "data")}}
		return harness.PodConfig(t, "victim"), container
	}
	pod1, container := victim()
	if err := script(d, harness.OCIHandler, pod1, container); err != nil {
		t.Fatalf("the script without a crash: %v", err)
	}
	before := resources(d)
	names := points(t, "vm-oci.")
	for _, name := range ociPoints {
		if !slices.Contains(names, name) {
			t.Errorf("%s is not a fail point", name)
		}
	}
	if os.Getenv("TRIPOD_TEST_FULL") == "" {
		names = ociPoints
	} else if len(names) < 10 {
		t.Errorf("fail points found: got %d, want at least 10", len(names))
	}
	for _, point := range names {
		t.Run(point, func(t *testing.T) {
			pod, container := victim()
			c := crash{d: d, handler: harness.OCIHandler, pod: pod, container: container, bystander: bystander.Pod.ID, before: before}
			c.at(t, point, func() error { return errors.Join(recordIsTrue(d), stillTicking(bystander)) })
		})
	}
}
