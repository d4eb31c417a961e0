package vm

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/stats"
)

// TestGuestMemory: the memory of a machine's container is the guest's, which a kubelet compares with the limit before it
// shrinks the container. Without an agent, and for the pod, it is the cgroup's.
func TestGuestMemory(t *testing.T) {
	r := newRig(t)
	p := r.pod("metered")
	c := r.container(p, "disk")
	c.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 160 << 20}
	held := stats.Figures{Memory: stats.Memory{Usage: 150 << 20, WorkingSet: 140 << 20}}
	for _, test := range []struct {
		name                         string
		guest                        *agent.Stats
		available, usage, workingSet uint64
	}{
		{name: "agent", guest: &agent.Stats{MemoryTotal: 130 << 20, MemoryAvailable: 90 << 20}, available: 90 << 20, usage: 70 << 20,
			workingSet: 70 << 20},
		{name: "more than its limit", guest: &agent.Stats{MemoryAvailable: 1 << 40}, available: 160 << 20},
		{name: "no agent", usage: 150 << 20, workingSet: 140 << 20},
	} {
		var s runtimeapi.ContainerStats
		r.fill(&s, p, c, held, test.guest)
		m := s.Memory
		if m.UsageBytes.Value != test.usage || m.WorkingSetBytes.Value != test.workingSet ||
			test.guest != nil && m.AvailableBytes.Value != test.available {
			t.Errorf("%s: got %v, want %d available, %d in use, %d in the working set", test.name, m, test.available, test.usage, test.workingSet)
		}
	}
}
