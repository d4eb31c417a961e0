package vm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// limitedPod makes a pod whose parent cgroup has a memory limit in bytes; 0 means no limit.
func (r *rig) limitedPod(name string, limit int64) *sandbox.Pod {
	r.Helper()
	tree := r.config.Cgroup
	parent := tree.Parent + "/kubepods/" + name
	r.must(tree.Make("memory", parent))
	r.must(tree.Apply(parent, tree.Limits(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: limit}, nil)))
	return r.pod(name, func(p *runtimeapi.PodSandboxConfig) { p.Linux.CgroupParent = parent })
}

// TestOutOfMemory: the status of a machine that the kernel killed for lack of memory says what to change: the overhead
// in the pod's RuntimeClass if the pod's cgroup is too small, otherwise the configuration.
func TestOutOfMemory(t *testing.T) {
	r := newRig(t, func(c *settings) { c.VM.DefaultMemory, c.VM.MemoryOverhead = 64<<20, 128<<20 })
	for name, c := range map[string]struct {
		limit int64
		says  string
	}{
		"without": {64 << 20, "is limited to 64Mi, the machine needs 192Mi (guest 64Mi, overhead 128Mi), and the pod's RuntimeClass declares an overhead of 0Mi: give it overhead.podFixed.memory: 128Mi"},
		"with":    {192 << 20, "QEMU needed more than 128Mi on top of the guest's 64Mi: raise vm.memory_overhead"},
	} {
		p := r.limitedPod(name, c.limit)
		container := r.create(p, "disk")
		r.must(r.StartContainer(r.ctx(), p, container))
		info, err := r.Inspect(r.ctx(), p, container)
		if warned := info["memoryWarning"] != nil; err != nil || warned != (name == "without") {
			t.Errorf("%s the overhead: Inspect = %v, %v", name, info, err)
		}
		r.driver.end(container.ID, machine.CauseOOM, 137)
		if got := r.waitEnd(container); got.Reason != sandbox.ReasonOOMKilled || !strings.Contains(got.Message, c.says) {
			t.Errorf("%s the overhead: status = %+v, want OOMKilled and %q", name, got, c.says)
		}
	}
}

// TestNoShortage: without a parent cgroup, or without a limit on it, there is no warning.
func TestNoShortage(t *testing.T) {
	r := newRig(t)
	for _, p := range []*sandbox.Pod{r.pod("by-hand"), r.limitedPod("unlimited", 0)} {
		if why := r.shortage(p, 1<<40); why != "" {
			t.Errorf("shortage(pod %s) = %q, want none", p.Config.Metadata.Name, why)
		}
	}
}

// TestLimitAboveTheParents: a kubelet reports a pod's new CPU limit before it raises that of the pod's cgroup. That is no error,
// and the machine has no lower limit of its own afterwards.
func TestLimitAboveTheParents(t *testing.T) {
	r := newRig(t)
	tree := r.config.Cgroup
	parent := tree.Parent + "/kubepods/pod"
	dir := parent + "/machine"
	quota := func(v int64) *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{CpuQuota: v, CpuPeriod: 100_000}
	}
	for _, dir := range []string{parent, dir} {
		for _, controller := range []string{"cpu", "memory"} {
			r.must(tree.Make(controller, dir))
		}
		r.must(tree.Apply(dir, tree.Limits(quota(30_000), nil)))
	}
	r.must(r.cgroups.Limit(dir, 64<<20, quota(20_000)))
	r.must(r.cgroups.Limit(dir, 64<<20, quota(50_000)))
	file, want := filepath.Join(tree.Roots[tree.Hierarchy("cpu")], dir, "cpu.cfs_quota_us"), "-1\n"
	if tree.V2 {
		file, want = filepath.Join(tree.Roots[tree.Hierarchy("cpu")], dir, "cpu.max"), "50000 100000\n"
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s: got %q, error %v; want %q", file, got, err, want)
	}
}
