package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// limitMemory limits the pod's cgroup, as the kubelet does to the sum of its containers' limits and its RuntimeClass's
// overhead.
func (k *kubelet) limitMemory(p *kubePod, limit int64) {
	k.t.Helper()
	k.must(os.WriteFile(filepath.Join(cgroupRoot("memory"), k.cgroup(p), memoryLimitFile()), []byte(fmt.Sprint(limit)), 0o644))
}

// TestVMWithoutOverhead: the RuntimeClass has no overhead, so the kubelet limits the pod's cgroup to the guest's
// memory. The kernel kills the machine because of that limit, at its start or later. The status names the limit and the
// remedy.
func TestVMWithoutOverhead(t *testing.T) {
	d := tinyVM(t, harness.Set("vm.memory_overhead", 128<<20))
	k := newKubelet(t, d)
	p := k.unitPod("no-overhead", machineUnits, func(c *runtimeapi.ContainerConfig, _ int) { c.Linux.Resources.MemoryLimitInBytes = 16 << 20 })
	p.restart = restartNever
	k.limitMemory(p, 16<<20)
	s := k.wait(p, func(s *podStatus) error {
		if c := s.of(p.containers[0]); c == nil || c.State != exited {
			return fmt.Errorf("want the container exited, got %v", c)
		}
		return nil
	})
	c := s.of(p.containers[0])
	for _, part := range []string{"is limited to 16Mi", "the machine needs 144Mi (guest 16Mi, overhead 128Mi)",
		"overhead.podFixed.memory: 128Mi"} {
		if !strings.Contains(c.Message, part) {
			t.Errorf("message: got %q, want %q in it", c.Message, part)
		}
	}
	if c.Reason != "OOMKilled" || c.ExitCode != 137 {
		t.Errorf("end of the machine: got %s with code %d, want OOMKilled with code 137", c.Reason, c.ExitCode)
	}
	k.remove(p)
}
