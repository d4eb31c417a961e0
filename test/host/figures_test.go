package host

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/until"
)

// metricsOf returns the metrics of a pod's only container by name. Of several with one name, the largest counts.
func metricsOf(t *testing.T, client runtimeapi.RuntimeServiceClient, container string) map[string]uint64 {
	t.Helper()
	answer, err := client.ListPodSandboxMetrics(t.Context(), &runtimeapi.ListPodSandboxMetricsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]uint64{}
	for _, pod := range answer.GetPodMetrics() {
		for _, c := range pod.GetContainerMetrics() {
			if c.GetContainerId() != container {
				continue
			}
			for _, m := range c.GetMetrics() {
				values[m.GetName()] = max(values[m.GetName()], m.GetValue().GetValue())
			}
		}
	}
	return values
}

// cgroupOf returns the directory of a container's cgroup.
func cgroupOf(t *testing.T, container string) string {
	t.Helper()
	return "/sys/fs/cgroup" + strings.TrimSpace(node.run(t, "tripod inspect %s | jq -r .info.info.cgroup", container))
}

// TestFiguresOfUnits: the metrics of a container are what the files of its scope say: memory, processor time, reads and writes
// of a real disk, pressure, processes that were killed for lack of memory. Each runtime is tested.
func TestFiguresOfUnits(t *testing.T) {
	client := node.cri(t)
	for _, handler := range []string{"crun", "runc"} {
		t.Run(handler, func(t *testing.T) {
			const limit = 96 << 20
			id := runLimited(t, client, handler,
				&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: limit, CpuQuota: 20_000, CpuPeriod: 100_000})
			dir := cgroupOf(t, id)
			// Half a processor wants to run on a fifth; 32 MB go to the disk; and something needs too much memory.
			node.run(t, `tripod exec %[1]s sh -c '(while :; do :; done) & sleep 5; kill $!; dd if=/dev/zero of=/file bs=1M count=32 conv=fsync; true'
			tripod exec %[1]s sh -c 'tail -c 200m /dev/zero | tail; true' || true`, id)
			var got map[string]uint64
			until.Within(t, time.Minute, "the daemon has measured since", func() bool {
				got = metricsOf(t, client, id)
				return got["container_oom_events_total"] > 0
			})
			file := func(script string) uint64 {
				n, err := strconv.ParseUint(strings.TrimSpace(node.run(t, "cd %s && %s", dir, script)), 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			about := func(metric string, want uint64) {
				t.Helper()
				if g := got[metric]; g > want || g < want/2 || want == 0 {
					t.Errorf("%s: got %d, want about %d", metric, g, want)
				}
			}
			about("container_oom_events_total", file("awk '/^oom_kill /{print $2}' memory.events"))
			about("container_cpu_cfs_throttled_periods_total", file("awk '/^nr_throttled/{print $2}' cpu.stat"))
			about("container_memory_max_usage_bytes", limit)
			about("container_fs_writes_bytes_total", file(`tr ' ' '\n' <io.stat | awk -F= '/^wbytes/{n+=$2} END {print n}'`))
			if want := file("cat memory.max"); got["container_spec_memory_limit_bytes"] != want || want != limit {
				t.Errorf("container_spec_memory_limit_bytes: got %d, memory.max is %d, want %d", got["container_spec_memory_limit_bytes"], want, limit)
			}
			for _, metric := range []string{"container_memory_working_set_bytes", "container_cpu_usage_seconds_total",
				"container_pressure_cpu_waiting_seconds_total",
				"container_pressure_memory_waiting_seconds_total", "container_pressure_io_waiting_seconds_total", "container_hugetlb_usage_bytes",
				"container_memory_swap"} {
				if _, found := got[metric]; !found {
					t.Errorf("%s is missing", metric)
				}
			}
			if usage, scope := got["container_memory_usage_bytes"], file("cat memory.current"); usage > 2*scope || scope > 2*usage {
				t.Errorf("container_memory_usage_bytes: got %d, memory.current is %d", usage, scope)
			}
		})
	}
}

// TestSwap: a container whose swap limit is above its memory limit swaps up to the difference, and its unit and its figures say
// so; one without a swap limit does not swap.
func TestSwap(t *testing.T) {
	node.run(t, "fallocate -l 512M /swapfile && chmod 600 /swapfile && mkswap --quiet /swapfile && swapon /swapfile")
	t.Cleanup(func() { node.run(t, "swapoff /swapfile && rm /swapfile") })
	client := node.cri(t)
	const memory, both = 64 << 20, 192 << 20
	for _, handler := range []string{"crun", "runc"} {
		t.Run(handler, func(t *testing.T) {
			none := runLimited(t, client, handler, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memory})
			if got := node.run(t, "cat %s/memory.swap.max", cgroupOf(t, none)); got != "0\n" {
				t.Errorf("memory.swap.max without a swap limit: got %q, want 0", got)
			}
			id := runLimited(t, client, handler, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memory, MemorySwapLimitInBytes: both})
			dir := cgroupOf(t, id)
			if got := node.run(t, "systemctl daemon-reload; cat %[1]s/memory.max %[1]s/memory.swap.max", dir); got != fmt.Sprintf("%d\n%d\n", memory,
				both-memory) {
				t.Errorf("limits of the unit: got %q, want %d, and %d of swap", got, memory, both-memory)
			}
			// It holds 100 MiB, because nobody reads what tail writes.
			node.run(t, `tripod exec %s sh -c '(head -c 100m /dev/zero | tail -c 100m | sleep 1000) >/dev/null 2>&1 &'`, id)
			until.Within(t, time.Minute, "the figures show that the container swaps", func() bool {
				used, err := strconv.ParseUint(strings.TrimSpace(node.run(t, "cat %s/memory.swap.current", dir)), 10, 64)
				figure := metricsOf(t, client, id)["container_memory_swap"]
				return err == nil && used > 16<<20 && figure > used/2 && figure < 2*used
			})
			if got := metricsOf(t, client, id)["container_spec_memory_swap_limit_bytes"]; got != both {
				t.Errorf("container_spec_memory_swap_limit_bytes: got %d, want %d", got, both)
			}
			answer, err := client.ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: id})
			if used := answer.GetStats().GetSwap().GetSwapUsageBytes().GetValue(); err != nil || used < 16<<20 {
				t.Errorf("swap usage of ContainerStats: got %d, error %v, want at least 16 MiB", used, err)
			}
		})
	}
}

// TestHugePages: a container gets as many huge pages as its limit says, and its figures count them.
func TestHugePages(t *testing.T) {
	node.run(t, "sysctl --quiet vm.nr_hugepages=8 && grep -q 'HugePages_Total: *8' /proc/meminfo")
	t.Cleanup(func() { node.run(t, "sysctl --quiet vm.nr_hugepages=0") })
	client := node.cri(t)
	const limit = 4 << 20
	for _, handler := range []string{"crun", "runc"} {
		t.Run(handler, func(t *testing.T) {
			id := runContainer(t, client, handler, func(_ *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
				c.Linux.Resources = &runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: limit}}}
				c.Mounts = []*runtimeapi.Mount{{HostPath: "/dev/hugepages", ContainerPath: "/pages"}}
			})
			// systemd has no such property, so the limit is that of the OCI runtime, in the scope or in crun's cgroup below it.
			if got := node.run(t, "systemctl daemon-reload; find %s -name hugetlb.2MB.max | xargs cat", cgroupOf(t, id)); !strings.Contains(got,
				fmt.Sprintln(limit)) {
				t.Errorf("hugetlb.2MB.max: got %q, want %d", got, limit)
			}
			t.Cleanup(func() { node.run(t, "rm -f /dev/hugepages/*") })
			node.run(t, "tripod exec %s fallocate -l %d /pages/within", id, limit)
			if out, err := node.try(t, "tripod exec %s fallocate -l 2097152 /pages/beyond", id); err == nil {
				t.Errorf("one huge page more than the limit was given: %s", out)
			}
			until.Within(t, time.Minute, "the figures count the pages", func() bool {
				return metricsOf(t, client, id)["container_hugetlb_usage_bytes"] == limit
			})
		})
	}
}
