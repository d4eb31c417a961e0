package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestVMOCIResources: what a kubelet's static CPU manager and its resizes send is the machine's, limits that the machine cannot
// have are refused, and figures have a file system of the node. The room of deleted files goes back to the node.
func TestVMOCIResources(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	p := d.RunPodWith(t, harness.PodConfig(t, "resources", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuShares: 2048, CpuPeriod: 100_000, MemoryLimitInBytes: 128 << 20}
	}), harness.OCIHandler)
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(), func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{
			CpuShares: 2048, MemoryLimitInBytes: 64 << 20, CpusetCpus: "0", CpusetMems: "0",
			HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}, {PageSize: "1GB"}},
		}
	}))
	if n := strings.TrimSpace(c.Must("nproc")); n != "2" {
		t.Errorf("CPUs of a container that requests two, and has one of the node's: got %s, want 2", n)
	}
	update := func(res *runtimeapi.LinuxContainerResources) error {
		_, err := d.CRI().UpdateContainerResources(t.Context(), &runtimeapi.UpdateContainerResourcesRequest{ContainerId: c.ID, Linux: res})
		return err
	}
	for _, res := range []*runtimeapi.LinuxContainerResources{{CpusetCpus: "0-1"}, {MemoryLimitInBytes: 96 << 20}} {
		if err := update(res); err != nil {
			t.Errorf("update to %v: %v", res, err)
		}
	}
	err := update(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 30})
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "linux.resources.memory_limit_in_bytes") {
		t.Errorf("a limit beyond the machine: got error %v, want Unimplemented with the field", err)
	}
	_, err = d.CRI().UpdatePodSandboxResources(t.Context(), &runtimeapi.UpdatePodSandboxResourcesRequest{
		PodSandboxId: p.ID, Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 46, CpuQuota: 150_000, CpuPeriod: 100_000},
	})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("a pod's limit beyond the node: got error %v, want Unimplemented", err)
	}
	c.Must("sh", "-c", "dd if=/dev/zero of=/deleted bs=1M count=400 && sync && rm /deleted && dd if=/dev/zero of=/written bs=1M count=8 && sync")
	scratch := filepath.Join(d.Root, "vm-oci", "pods", p.ID, "scratch0.qcow2")
	if used := allocated(t, scratch); used < 400<<20 {
		t.Errorf("the scratch disk takes %d bytes, want the 400 MiB of a deleted file, too", used)
	}
	harness.Eventually(t, 30*time.Second, func() error {
		resp, err := d.CRI().ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: c.ID})
		if err != nil {
			return err
		}
		s := resp.GetStats()
		layer := s.GetWritableLayer()
		if info, err := os.Stat(layer.GetFsId().GetMountpoint()); err != nil || !info.IsDir() {
			t.Fatalf("file system of the writable layer: got %v, want a directory of the node", layer)
		}
		if layer.GetUsedBytes().GetValue() < 8<<20 || layer.GetUsedBytes().GetValue() > 64<<20 ||
			s.GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 ||
			s.GetMemory().GetWorkingSetBytes().GetValue() == 0 {
			return fmt.Errorf("statistics: got %v, want CPU, memory, and a layer of 8 MiB and a little", s)
		}
		samples := samplesOf(t, d, c)
		for _, name := range slices.Concat([]string{"container_cpu_usage_seconds_total", "container_memory_working_set_bytes",
			"container_processes"}, diskMetrics) {
			if samples[name] <= 0 {
				t.Errorf("metric %s: got %v", name, samples[name])
			}
		}
		if used := allocated(t, scratch); used > 256<<20 {
			return fmt.Errorf("the scratch disk takes %d bytes after the statistics were read, want the deleted file's room back", used)
		}
		return nil
	})
}

// samplesOf returns the values of a container's metrics by name, from what a kubelet shows at /metrics/cadvisor.
func samplesOf(t *testing.T, d *harness.Daemon, c *harness.Container) map[string]float64 {
	t.Helper()
	values := map[string]float64{}
	for name, family := range gather(t, d) {
		for _, m := range family.Metric {
			for _, l := range m.Label {
				if l.GetName() == "id" && strings.Contains(l.GetValue(), c.ID) {
					values[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
	}
	return values
}

// allocated returns what a file takes on the disk in bytes.
func allocated(t *testing.T, file string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// TestVMOCIGrows: a running pod gets more memory and CPUs than its machine was started with, uses them, and gives the memory
// back, also to the next daemon.
func TestVMOCIGrows(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	p := d.RunPodWith(t, harness.PodConfig(t, "grows", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuQuota: 100_000, CpuPeriod: 100_000, MemoryLimitInBytes: 128 << 20}
	}), harness.OCIHandler)
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(), func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuQuota: 100_000, CpuPeriod: 100_000, MemoryLimitInBytes: 100 << 20}
	}))
	resize := func(mib, cpus int64) error {
		res := &runtimeapi.LinuxContainerResources{CpuQuota: cpus * 100_000, CpuPeriod: 100_000, MemoryLimitInBytes: mib << 20}
		_, err := d.CRI().UpdatePodSandboxResources(t.Context(), &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: p.ID, Resources: res})
		return err
	}
	check := func(when string, low, high, cpus int64) {
		t.Helper()
		online := strings.TrimSpace(c.Must("nproc"))
		if mib := memTotal(t, c); mib < low || mib > high || online != fmt.Sprint(cpus) {
			t.Errorf("%s: the guest has %d MiB and %s CPUs, want %d to %d MiB and %d CPUs", when, mib, online, low, high, cpus)
		}
	}
	check("at the start", 250, 320, 1)
	if err := resize(1024, 2); err != nil {
		t.Fatalf("a pod with 1 GiB and two CPUs: %v", err)
	}
	check("larger", 1024, 1216, 2)
	_, err := d.CRI().UpdateContainerResources(t.Context(), &runtimeapi.UpdateContainerResourcesRequest{
		ContainerId: c.ID, Linux: &runtimeapi.LinuxContainerResources{CpuQuota: 200_000, CpuPeriod: 100_000, MemoryLimitInBytes: 900 << 20},
	})
	if err != nil {
		t.Fatalf("a container with 900 MiB: %v", err)
	}
	c.Must("dd", "if=/dev/zero", "of=/dev/null", "bs=600M", "count=1") // which needs a buffer of this size
	_, err = d.CRI().UpdateContainerResources(t.Context(),
		&runtimeapi.UpdateContainerResourcesRequest{ContainerId: c.ID, Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 100 << 20}})
	if err != nil {
		t.Errorf("a container with 100 MiB again: %v", err)
	}
	d.Kill()
	d.Start()
	if err := resize(256, 1); err != nil {
		t.Errorf("a pod with 256 MiB again: %v", err)
	}
	check("smaller", 384, 448, 2)
}

// TestVMOCIUnlimited: the limits that a kubelet sends for a pod are the sum of those that its containers have. A container without
// one, beside a sidecar with little, gets memory and CPU time of its own.
func TestVMOCIUnlimited(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	small := func() *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{CpuQuota: 50_000, CpuPeriod: 100_000, MemoryLimitInBytes: 64 << 20}
	}
	p := d.RunPodWith(t, harness.PodConfig(t, "unlimited", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.CgroupParent, c.Linux.Resources = d.CgroupParent+"/kubepods/burstable/pod1", small()
	}), harness.OCIHandler)
	sidecar := p.Run(harness.ContainerConfig("sidecar", harness.Busybox, harness.Sleep(), func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources = small()
	}))
	before := memTotal(t, sidecar)
	app := p.Run(harness.ContainerConfig("app", harness.Busybox, harness.Sleep()))
	if after := memTotal(t, app); after < before+100 {
		t.Errorf("the machine has %d MiB with a container without limits, and had %d before, want 128 more", after, before)
	}
	app.Must("dd", "if=/dev/zero", "of=/dev/null", "bs=120M", "count=1") // which needs a buffer of this size
	if _, _, code := sidecar.ExecSync("dd", "if=/dev/zero", "of=/dev/null", "bs=120M", "count=1"); code == 0 {
		t.Error("the sidecar uses 120 MiB, more than its limit")
	}
	if machine := limitsOf(t, &harness.Container{ID: p.ID}); machine.quota != -1 {
		t.Errorf("the CPU time of the machine: got a quota of %d µs, want none", machine.quota)
	}
}
