package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// statsOf returns the results of ListContainerStats by container ID.
func statsOf(t *testing.T, d *harness.Daemon, filter *runtimeapi.ContainerStatsFilter) map[string]*runtimeapi.ContainerStats {
	t.Helper()
	all, err := d.Runtime().ListContainerStats(context.Background(), filter)
	if err != nil {
		t.Fatal(err)
	}
	byID := map[string]*runtimeapi.ContainerStats{}
	for _, s := range all {
		byID[s.Attributes.Id] = s
	}
	return byID
}

func TestContainerStatsLists(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	labelled := func(p *harness.Pod, name, label string) *harness.Container {
		return p.Run(harness.ContainerConfig(name, harness.Busybox, harness.Sleep(),
			func(c *runtimeapi.ContainerConfig) { c.Labels = map[string]string{"which": label} }))
	}
	t.Run("runtime should support listing container stats [Conformance]", func(t *testing.T) {
		c := sleeper(t, d)
		got := statsOf(t, d, &runtimeapi.ContainerStatsFilter{Id: c.ID})
		s := got[c.ID]
		if len(got) != 1 || s == nil || s.Attributes.Metadata.Name != "c" {
			t.Fatalf("ListContainerStats: got %v, want only %s", got, c.ID)
		}
		if s.Cpu.GetTimestamp() == 0 || s.Memory.GetTimestamp() == 0 || s.Cpu.GetUsageCoreNanoSeconds() == nil ||
			s.Memory.GetWorkingSetBytes().GetValue() == 0 || s.WritableLayer == nil {
			t.Errorf("stats: got %v, want CPU, memory and writable layer with their times", s)
		}
	})
	t.Run("runtime should support listing stats for started containers [Conformance]", func(t *testing.T) {
		p := startPod(t, d)
		one, two := labelled(p, "one", "a"), labelled(p, "two", "a")
		if got := statsOf(t, d, &runtimeapi.ContainerStatsFilter{PodSandboxId: p.ID}); len(got) != 2 || got[one.ID] == nil || got[two.ID] == nil {
			t.Errorf("ListContainerStats by pod: got %v, want only %s and %s", got, one.ID, two.ID)
		}
	})
	t.Run("runtime should support listing stats for started containers when filter is nil [Conformance]", func(t *testing.T) {
		p := startPod(t, d)
		one, two := labelled(p, "one", "a"), labelled(p, "two", "a")
		two.Stop(0)
		two.WaitState(exited)
		if got := statsOf(t, d, nil); got[one.ID] == nil || got[two.ID] != nil {
			t.Errorf("ListContainerStats: got %v, want %s and not the exited %s", got, one.ID, two.ID)
		}
	})
	t.Run("runtime should support listing stats for three created containers when filter is nil. [Conformance]", func(t *testing.T) {
		p := startPod(t, d)
		var want []string
		for _, name := range []string{"one", "two", "three"} {
			want = append(want, labelled(p, name, "a").ID)
		}
		if got := slices.Sorted(maps.Keys(statsOf(t, d, nil))); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Errorf("ListContainerStats: got %v, want %v", got, want)
		}
	})
	t.Run("runtime should support listing stats for containers filtered by labels [Conformance]", func(t *testing.T) {
		p := startPod(t, d)
		one := labelled(p, "one", "mine")
		labelled(p, "two", "other")
		if got := statsOf(t, d, &runtimeapi.ContainerStatsFilter{LabelSelector: map[string]string{"which": "mine"}}); len(got) != 1 ||
			got[one.ID] == nil {
			t.Errorf("ListContainerStats by label: got %v, want only %s", got, one.ID)
		}
	})
}

// TestFigures checks that the stats show the use of each resource.
func TestFigures(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	p, other := startPod(t, d), startPod(t, d)
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(),
		resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 256 << 20})))
	of := func() (*runtimeapi.ContainerStats, *runtimeapi.PodSandboxStats) {
		t.Helper()
		ctr, err := d.Runtime().ContainerStats(ctx, c.ID)
		if err != nil {
			t.Fatal(err)
		}
		pod, err := d.Runtime().PodSandboxStats(ctx, p.ID)
		if err != nil {
			t.Fatal(err)
		}
		return ctr, pod
	}
	cpu := func(u *runtimeapi.CpuUsage) uint64 { return u.GetUsageCoreNanoSeconds().GetValue() }
	before, podBefore := of()
	t.Run("CPU", func(t *testing.T) {
		c.Must("sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
		after, pod := of()
		if n := cpu(after.Cpu) - cpu(before.Cpu); n < 20e6 || n > 60e9 {
			t.Errorf("CPU time of a busy loop: got %d ns, want 20e6 to 60e9", n)
		}
		if cpu(pod.Linux.Cpu) < cpu(podBefore.Linux.Cpu)+20e6 {
			t.Errorf("CPU time of the pod: got %d ns, want at least 20e6 more than %d", cpu(pod.Linux.Cpu), cpu(podBefore.Linux.Cpu))
		}
	})
	t.Run("memory", func(t *testing.T) {
		c.Must("sh", "-c", "head -c 40000000 /dev/zero >/dev/shm/x")
		after, pod := of()
		set := after.Memory.GetWorkingSetBytes().GetValue()
		if set < before.Memory.GetWorkingSetBytes().GetValue()+35e6 || set > 256<<20 {
			t.Errorf("memory after using 40 MB: got %v, was %v", after.Memory, before.Memory)
		}
		if pod.Linux.Memory.GetWorkingSetBytes().GetValue() < 35e6 {
			t.Errorf("memory of the pod: got %v, want a working set of at least 35 MB", pod.Linux.Memory)
		}
		if available := after.Memory.GetAvailableBytes().GetValue(); available != 256<<20-set {
			t.Errorf("available memory: got %d, want %d, the limit minus the working set", available, 256<<20-set)
		}
	})
	t.Run("processes", func(t *testing.T) {
		_, before := of()
		c.Must("sh", "-c", "for i in 1 2 3 4 5; do sleep 3600 >/dev/null 2>&1 </dev/null & done")
		_, after := of()
		was, is := before.Linux.Process.GetProcessCount().GetValue(), after.Linux.Process.GetProcessCount().GetValue()
		if was == 0 || is < was+5 {
			t.Errorf("processes after starting 5: got %d, was %d", is, was)
		}
	})
	t.Run("network", func(t *testing.T) {
		other.Run(httpd("web"))
		c.Must("sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 0; do wget -q -O /dev/null http://"+other.IP()+" && exit; usleep 100000; done; exit 1")
		_, after := of()
		a, b := podBefore.Linux.Network.GetDefaultInterface(), after.Linux.Network.GetDefaultInterface()
		if b.GetName() != "eth0" || b.GetRxBytes().GetValue() < a.GetRxBytes().GetValue()+100 ||
			b.GetTxBytes().GetValue() < a.GetTxBytes().GetValue()+100 {
			t.Errorf("network figures: got %v, was %v; want eth0 and at least 100 bytes more each way", b, a)
		}
	})
	t.Run("the pod's list has its containers", func(t *testing.T) {
		all, err := d.Runtime().ListPodSandboxStats(ctx, &runtimeapi.PodSandboxStatsFilter{Id: p.ID})
		if err != nil || len(all) != 1 {
			t.Fatalf("ListPodSandboxStats: got %v, error %v; want one pod", all, err)
		}
		if s := all[0].Linux.Containers; len(s) != 1 || s[0].Attributes.Id != c.ID {
			t.Errorf("containers in the pod stats: got %v, want only %s", s, c.ID)
		}
	})
	t.Run("writable layer", func(t *testing.T) {
		c.Must("sh", "-c", "head -c 10000000 /dev/zero >/written")
		harness.Eventually(t, waitLimit, func() error {
			after, _ := of()
			if used := after.WritableLayer.GetUsedBytes().GetValue(); used < 10e6 || used > 20e6 {
				return fmt.Errorf("writable layer after writing 10 MB: got %v, want 10 to 20 MB", after.WritableLayer)
			}
			return nil
		})
	})
	t.Run("of what is not there", func(t *testing.T) {
		_, err := d.CRI().ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: strings.Repeat("1f", 32)})
		wantCode(t, err, codes.NotFound)
		_, err = d.CRI().PodSandboxStats(ctx, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: strings.Repeat("1f", 32)})
		wantCode(t, err, codes.NotFound)
	})
}

// cgroupFile returns the content of a file in the container's cgroup.
func cgroupFile(t *testing.T, c *harness.Container, controller, file string) string {
	t.Helper()
	dir := filepath.Join(cgroupRoot(controller), cgroupOf(t, c, controller))
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// cgroupOf returns the path of the container's cgroup, which it finds by ID below the daemon's parent cgroup.
func cgroupOf(t *testing.T, c *harness.Container, controller string) string {
	t.Helper()
	root := cgroupRoot(controller)
	var found string
	err := filepath.WalkDir(root+harness.CgroupParent(), func(path string, e os.DirEntry, err error) error {
		if err == nil && e.IsDir() && strings.Contains(e.Name(), c.ID) {
			found = strings.TrimPrefix(path, root)
			return filepath.SkipAll
		}
		return nil
	})
	if err != nil || found == "" {
		t.Fatalf("found no cgroup of %s in %s, error %v", c.ID, root, err)
	}
	return found
}

// cgroupLimits are limits in a cgroup, in bytes and µs; -1: none. weight is cpu.weight of cgroup v2.
type cgroupLimits struct {
	memory, both, quota, weight int64
	cpus                        string
}

// limitsOf reads the limits in the container's cgroup.
func limitsOf(t *testing.T, c *harness.Container) (l cgroupLimits) {
	t.Helper()
	number := func(controller, file string) int64 {
		first, _, _ := strings.Cut(cgroupFile(t, c, controller, file), " ")
		if first == "max" {
			return -1
		}
		n, err := strconv.ParseInt(first, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if n >= 1<<60 { // cgroup v1 has no other word for it
			return -1
		}
		return n
	}
	if l.cpus = cgroupFile(t, c, "cpuset", "cpuset.cpus"); !onV2() {
		l.memory, l.both = number("memory", "memory.limit_in_bytes"), number("memory", "memory.memsw.limit_in_bytes")
		l.quota, l.weight = number("cpu", "cpu.cfs_quota_us"), weightOf(number("cpu", "cpu.shares"))
		return l
	}
	l.memory, l.both = number("memory", "memory.max"), number("memory", "memory.swap.max")
	if l.both >= 0 {
		l.both += l.memory
	}
	l.quota, l.weight = number("cpu", "cpu.max"), number("cpu", "cpu.weight")
	return l
}

// weightOf converts shares of cgroup v1 to the weight of v2, as crun 1.8 and runc 1.1 do.
func weightOf(shares int64) int64 { return 1 + (shares-2)*9999/262142 }

func TestResources(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	update := func(c *harness.Container, r *runtimeapi.LinuxContainerResources) error {
		_, err := d.CRI().UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{ContainerId: c.ID, Linux: r})
		return err
	}
	t.Run("limits are in the cgroup, and an update changes those that it names", func(t *testing.T) {
		c := sleeper(t, d, resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 512, CpusetCpus: "0"}))
		want := func(memory, shares int64) (r *runtimeapi.LinuxContainerResources) {
			t.Helper()
			r = c.Status().GetResources().GetLinux()
			l := cgroupLimits{memory, r.GetMemorySwapLimitInBytes(), -1, weightOf(shares), "0"}
			if got := limitsOf(t, c); got != l {
				t.Errorf("limits: got %+v, want %+v", got, l)
			}
			return r
		}
		want(64<<20, 512)
		if err := update(c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 96 << 20, CpuShares: 256}); err != nil {
			t.Fatal(err)
		}
		r := want(96<<20, 256)
		if r.GetMemoryLimitInBytes() != 96<<20 || r.GetCpuShares() != 256 || r.GetCpusetCpus() != "0" {
			t.Errorf("resources in the status: got %v, want those of the update", r)
		}
		d.Restart()
		if again := c.Status().GetResources().GetLinux(); again.String() != r.String() {
			t.Errorf("resources in the status after a restart: got %v, want %v", again, r)
		}
	})
	t.Run("an update of a created container holds at its start", func(t *testing.T) {
		c := startPod(t, d).Create(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(),
			resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20})))
		if err := update(c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 80 << 20}); err != nil {
			t.Fatal(err)
		}
		c.Start()
		if got := limitsOf(t, c).memory; got != 80<<20 {
			t.Errorf("memory limit: got %d, want %d", got, 80<<20)
		}
	})
	t.Run("an update that cannot be made changes nothing", func(t *testing.T) {
		c := sleeper(t, d, resources(&runtimeapi.LinuxContainerResources{CpuShares: 512}))
		wantCode(t, update(c, &runtimeapi.LinuxContainerResources{CpuShares: -5}), codes.InvalidArgument)
		if err := update(c, &runtimeapi.LinuxContainerResources{CpusetCpus: "4000"}); err == nil {
			t.Error("update with a missing CPU succeeded, want an error")
		}
		if got := limitsOf(t, c).weight; got != weightOf(512) || c.Status().GetResources().GetLinux().GetCpusetCpus() != "" {
			t.Errorf("after refused updates: got the weight %d, status %v; want them unchanged", got, c.Status().Resources)
		}
		c.Stop(0)
		wantCode(t, update(c, &runtimeapi.LinuxContainerResources{CpuShares: 256}), codes.FailedPrecondition)
	})
	t.Run("memory and CPU time shrink, grow and lose their limits in any order", func(t *testing.T) {
		c := sleeper(t, d, resources(&runtimeapi.LinuxContainerResources{
			MemoryLimitInBytes: 64 << 20, MemorySwapLimitInBytes: 96 << 20, CpuPeriod: 100_000, CpuQuota: 50_000,
		}))
		for _, step := range []struct{ memory, both, period, quota int64 }{
			{32 << 20, 64 << 20, 10_000, 5_000},
			{256 << 20, 288 << 20, 1_000_000, 900_000},
			{128 << 20, 160 << 20, 1_000, 1_000},
			{-1, -1, 100_000, -1},
			{48 << 20, 48 << 20, 100_000, 20_000},
		} {
			change := &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: step.memory, CpuPeriod: step.period, CpuQuota: step.quota}
			if step.both == step.memory {
				change.MemorySwapLimitInBytes = step.both
			}
			if err := update(c, change); err != nil {
				t.Fatalf("update to %+v: %v", step, err)
			}
			r := c.Status().GetResources().GetLinux()
			if r.GetMemoryLimitInBytes() != step.memory || r.GetMemorySwapLimitInBytes() != step.both || r.GetCpuQuota() != step.quota ||
				r.GetCpuPeriod() != step.period {
				t.Errorf("status after the update to %+v: %v", step, r)
			}
			if got := limitsOf(t, c); got.memory != step.memory || got.both != step.both || got.quota != step.quota {
				t.Errorf("limits after the update to %+v: %+v", step, got)
			}
		}
	})
	t.Run("a memory limit below what the container uses is refused, and all limits stay", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, func(c *runtimeapi.ContainerConfig) {
			c.Command = []string{"sh", "-c", `x=$(head -c 20000000 /dev/zero | tr '\0' x); echo ready; sleep 1000 & wait`}
		}, resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, CpuShares: 512})))
		c.WaitLog("ready")
		wantCode(t, update(c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 8 << 20, CpuShares: 100}), codes.FailedPrecondition)
		if got := limitsOf(t, c); got.memory != 128<<20 || got.weight != weightOf(512) {
			t.Errorf("after the refused update: %+v; want the limits unchanged", got)
		}
		if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING ||
			s.GetResources().GetLinux().GetMemoryLimitInBytes() != 128<<20 {
			t.Errorf("after the refused update: %v", s)
		}
	})
	t.Run("a pod without a cgroup parent is resized in its own cgroup", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "resized", func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.CgroupParent = ""
			c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 512}
		}))
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		pod := func(memory, overhead int64) error {
			_, err := d.CRI().UpdatePodSandboxResources(ctx, &runtimeapi.UpdatePodSandboxResourcesRequest{
				PodSandboxId: p.ID, Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memory},
				Overhead: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: overhead},
			})
			return err
		}
		limit := func() string {
			raw, err := os.ReadFile(filepath.Join(cgroupRoot("memory"), filepath.Dir(cgroupOf(t, c, "memory")), memoryLimitFile()))
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(string(raw))
		}
		if err := pod(100<<20, 8<<20); err != nil || limit() != strconv.Itoa(108<<20) {
			t.Errorf("resize of the pod: error %v, limit %s, want 108 MiB", err, limit())
		}
		wantCode(t, pod(4096, 1), codes.FailedPrecondition)
		if limit() != strconv.Itoa(108<<20) {
			t.Errorf("limit after a refused resize: %s, want 108 MiB", limit())
		}
		if err := pod(-1, 0); err != nil || len(limit()) < 16 && limit() != "max" {
			t.Errorf("lift of the pod's limit: error %v, limit %s", err, limit())
		}
	})
	t.Run("the pod's cgroup parent is honoured, and left to its owner", func(t *testing.T) {
		parent := d.CgroupParent + "/kubepods/burstable/pod1234"
		p := d.RunPod(t, harness.PodConfig(t, "p", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = parent }))
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(),
			resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20})))
		if got := cgroupOf(t, c, "memory"); !strings.HasPrefix(got, parent+"/") {
			t.Errorf("cgroup of the container: got %s, want one below %s", got, parent)
		}
		p.Remove()
		entries, err := os.ReadDir(cgroupRoot("memory") + parent)
		for _, e := range entries {
			if e.IsDir() {
				t.Errorf("cgroup left in the parent: %s", e.Name())
			}
		}
		if err != nil {
			t.Errorf("the parent cgroup, which the kubelet removes: %v", err)
		}
	})
	t.Run("the OOM score is the container's, within what the daemon may give", func(t *testing.T) {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", d.Pid()))
		if err != nil {
			t.Fatal(err)
		}
		own, err := strconv.Atoi(strings.TrimSpace(string(data)))
		if err != nil {
			t.Fatal(err)
		}
		score := func(want int64) int {
			t.Helper()
			c := sleeper(t, d, resources(&runtimeapi.LinuxContainerResources{OomScoreAdj: want}))
			got, err := strconv.Atoi(strings.TrimSpace(c.Must("cat", "/proc/1/oom_score_adj")))
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		if got := score(777); got != 777 {
			t.Errorf("oom_score_adj: got %d, want 777", got)
		}
		if got := score(-998); got != -998 && got != own {
			t.Errorf("oom_score_adj: got %d, want -998, or the daemon's own %d if it cannot set less", got, own)
		}
		_, err = create(d, startPod(t, d),
			harness.ContainerConfig("c", harness.Busybox, resources(&runtimeapi.LinuxContainerResources{OomScoreAdj: 1001})))
		wantCode(t, err, codes.InvalidArgument)
	})
}
