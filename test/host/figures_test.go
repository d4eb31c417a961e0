package host

import (
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
			id := runLimited(t, client, handler, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: limit, CpuQuota: 20_000, CpuPeriod: 100_000})
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
			for _, metric := range []string{"container_memory_working_set_bytes", "container_cpu_usage_seconds_total", "container_pressure_cpu_waiting_seconds_total",
				"container_pressure_memory_waiting_seconds_total", "container_pressure_io_waiting_seconds_total", "container_hugetlb_usage_bytes", "container_memory_swap"} {
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

// TestAppArmorIsEnforced: the default profile is in force, and so is one of the host, whose denials the kernel logs.
func TestAppArmorIsEnforced(t *testing.T) {
	client := node.cri(t)
	profileOf := func(container string) string {
		return node.run(t, "cat /proc/$(tripod inspect %s | jq -r .info.info.pid)/attr/current", container)
	}
	for _, handler := range []string{"crun", "runc"} {
		if got := profileOf(runContainer(t, client, handler, nil)); got != "tripod-default (enforce)\n" {
			t.Errorf("profile of a container of %s: got %q, want tripod-default in force", handler, got)
		}
	}
	node.run(t, `printf 'profile test-denies flags=(attach_disconnected,mediate_deleted) { file, network, capability, signal, audit deny /denied w, }' | apparmor_parser --replace`)
	since := strings.TrimSpace(node.run(t, "date +%%s"))
	denies := &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
		Apparmor: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "test-denies"}}}
	id := runContainer(t, client, "crun", denies)
	if out, err := node.try(t, "tripod exec %s sh -c 'echo x >/allowed && echo x >/denied'", id); err == nil || !strings.Contains(out, "/denied") {
		t.Errorf("write that the profile denies: got error %v: %s", err, out)
	}
	if log := node.run(t, "journalctl --dmesg --since @%s | grep 'apparmor=\"DENIED\".*test-denies' || true", since); !strings.Contains(log, "/denied") {
		t.Errorf("the kernel's log of the denial: got %q", log)
	}
}
