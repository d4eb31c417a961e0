package workers

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestLimitOfForeignWorker checks that a component in a pod of another kind and its worker together get the limit of the
// container, and that the worker of another pod gets more, for itself.
func TestLimitOfForeignWorker(t *testing.T) {
	tree, err := cgroup.Open(cgroup.DriverCgroupfs, "/test")
	require.NoError(t, err)
	p := &sandbox.Pod{ID: "p", Config: &runtimeapi.PodSandboxConfig{}}
	foreign := &sandbox.Container{ID: "c"}
	own := &sandbox.Container{ID: "p"}
	require.True(t, sandbox.IsForeign(p, foreign))
	require.False(t, sandbox.IsForeign(p, own))
	for limit, memory := range map[int64]int64{0: 0, -1: -1, ForeignMinimum: 8 << 20, 64 << 20: 48 << 20} {
		config := &runtimeapi.ContainerConfig{Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: limit}}}
		foreign.Config, own.Config = config, config
		require.Equal(t, memory, MemoryLimit(p, foreign), "memory of the component with the limit %d", limit)
		require.Equal(t, limit, MemoryLimit(p, own))
		if limit > 0 {
			require.Equal(t, limit, memoryOf(t, limitsOf(tree, p, foreign)))
			require.Equal(t, limit+workerOverhead, memoryOf(t, limitsOf(tree, p, own)))
		}
	}
}

// memoryOf returns the limit in cgroup files, in bytes.
func memoryOf(t *testing.T, limits []cgroup.Write) int64 {
	t.Helper()
	for _, w := range limits {
		if w.Controller == "memory" {
			n, err := strconv.ParseInt(w.Value, 10, 64)
			require.NoError(t, err)
			return n
		}
	}
	t.Fatal("no limit of the memory")
	return 0
}
