package stats_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/stats"
)

// moreV1 are files besides those of v1Tree that ReadAll reads.
var moreV1 = map[string]string{
	"cpuacct" + group + "/cpuacct.stat":              "user 5578\nsystem 2736\n",
	"cpu" + group + "/cpu.stat":                      "nr_periods 100\nnr_throttled 7\nthrottled_time 900000\nnr_bursts 2\nburst_time 3000000000\n",
	"memory" + group + "/memory.max_usage_in_bytes":  "150000000\n",
	"memory" + group + "/memory.kmem.usage_in_bytes": "1048576\n",
	"memory" + group + "/memory.failcnt":             "3\n",
	"memory" + group + "/memory.stat": "pgfault 3000\npgmajfault 4\ntotal_cache 50000000\ntotal_rss 40000000\ntotal_rss_huge 2097152\ntotal_mapped_file 3000000\n" +
		"total_dirty 4096\ntotal_writeback 8192\ntotal_workingset_refault_anon 11\ntotal_workingset_refault_file 12\ntotal_pgfault 4000\n" +
		"total_pgmajfault 5\ntotal_inactive_anon 13\ntotal_active_anon 14\ntotal_inactive_file 4857600\ntotal_active_file 15\ntotal_swap 1000000\n",
	"pids" + group + "/pids.max":                                   "max\n",
	"blkio" + group + "/blkio.throttle.io_service_bytes_recursive": "999:1 Read 4096\n999:1 Write 8192\n999:1 Sync 12288\n999:1 Discard 0\n999:1 Total 12288\nTotal 12288\n",
	"blkio" + group + "/blkio.throttle.io_serviced_recursive":      "999:1 Read 1\n999:1 Write 2\n999:1 Total 3\nTotal 3\n",
	"hugetlb" + group + "/hugetlb.2MB.usage_in_bytes":              "2097152\n",
	"hugetlb" + group + "/hugetlb.2MB.max_usage_in_bytes":          "4194304\n",
	"unified" + group + "/cpu.pressure":                            v2Tree[group+"/cpu.pressure"],
	"unified" + group + "/memory.pressure":                         v2Tree[group+"/memory.pressure"],
	"unified" + group + "/io.pressure":                             v2Tree[group+"/io.pressure"],
}

// moreV2 are the same files on cgroup v2.
var moreV2 = map[string]string{
	group + "/cpu.stat": "usage_usec 123456789\nuser_usec 55780000\nsystem_usec 27360000\nnr_periods 100\nnr_throttled 7\nthrottled_usec 900\n" +
		"nr_bursts 2\nburst_usec 3000000\n",
	group + "/memory.peak":   "150000000\n",
	group + "/memory.events": "low 0\nhigh 9\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n",
	group + "/memory.stat": "anon 40000000\nfile 50000000\nkernel 1048576\nfile_mapped 3000000\nfile_dirty 4096\nfile_writeback 8192\nanon_thp 2097152\nfile_thp 21\n" +
		"shmem_thp 22\ninactive_anon 13\nactive_anon 14\ninactive_file 4857600\nactive_file 15\nworkingset_refault_anon 11\nworkingset_refault_file 12\n" +
		"pgscan 23\npgsteal 24\npgfault 4000\npgmajfault 5\n",
	group + "/pids.max":            "100\n",
	group + "/io.stat":             "999:1 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n",
	group + "/hugetlb.2MB.current": "2097152\n",
}

// wantSamples are the samples of both trees. wantV1 and wantV2 are those that differ.
var (
	wantSamples = map[string]float64{
		"container_cpu_usage_seconds_total total": 123.456789, "container_cpu_user_seconds_total": 55.78,
		"container_cpu_system_seconds_total": 27.36,
		"container_cpu_cfs_periods_total":    100, "container_cpu_cfs_throttled_periods_total": 7,
		"container_cpu_cfs_throttled_seconds_total": 0.0009,
		"container_cpu_cfs_burst_periods_total":     2, "container_cpu_cfs_burst_seconds_total": 3,
		"container_memory_usage_bytes": 104857600, "container_memory_working_set_bytes": 100000000, "container_memory_max_usage_bytes": 150000000,
		"container_memory_rss": 40000000, "container_memory_cache": 50000000, "container_memory_mapped_file": 3000000,
		"container_memory_total_active_file_bytes": 15, "container_memory_total_inactive_file_bytes": 4857600,
		"container_memory_active_anon_bytes": 14, "container_memory_inactive_anon_bytes": 13, "container_memory_anon_thp_bytes": 2097152,
		"container_memory_file_dirty_bytes": 4096, "container_memory_file_writeback_bytes": 8192,
		"container_memory_workingset_refault_anon_total": 11, "container_memory_workingset_refault_file_total": 12,
		"container_memory_kernel_usage": 1048576, "container_memory_swap": 1000000, "container_memory_failcnt": 3,
		"container_memory_events_max_total": 3, "container_oom_events_total": 2,
		"container_memory_failures_total pgfault hierarchy": 4000, "container_memory_failures_total pgmajfault hierarchy": 5,
		"container_hugetlb_usage_bytes 2MB":                   2097152,
		"container_blkio_device_usage_total 999:1 999 1 Read": 4096, "container_blkio_device_usage_total 999:1 999 1 Write": 8192,
		"container_blkio_device_usage_total 999:1 999 1 Discard": 0,
		"container_fs_reads_total 999:1":                         1, "container_fs_writes_total 999:1": 2,
		"container_fs_reads_bytes_total 999:1": 4096, "container_fs_writes_bytes_total 999:1": 8192,
		"container_processes": 0, "container_threads": 12, "container_file_descriptors": 0, "container_sockets": 0,
		"container_pressure_cpu_waiting_seconds_total": 77e-6, "container_pressure_cpu_stalled_seconds_total": 0,
		"container_pressure_memory_waiting_seconds_total": 1e-6, "container_pressure_memory_stalled_seconds_total": 2e-6,
		"container_pressure_io_waiting_seconds_total": 3e-6, "container_pressure_io_stalled_seconds_total": 4e-6,
	}
	wantV1 = map[string]float64{
		"container_cpu_usage_seconds_total total":           123.456789012,
		"container_memory_failures_total pgfault container": 3000, "container_memory_failures_total pgmajfault container": 4,
		"container_memory_shmem_thp_bytes": 0, "container_memory_file_thp_bytes": 0, "container_memory_pgscan_total": 0,
		"container_memory_pgsteal_total": 0, "container_memory_events_high_total": 0, "container_hugetlb_max_usage_bytes 2MB": 4194304,
		"container_threads_max":                               0,
		"container_blkio_device_usage_total 999:1 999 1 Sync": 12288, "container_blkio_device_usage_total 999:1 999 1 Total": 12288,
	}
	wantV2 = map[string]float64{
		"container_memory_failures_total pgfault container": 4000, "container_memory_failures_total pgmajfault container": 5,
		"container_memory_shmem_thp_bytes": 22, "container_memory_file_thp_bytes": 21, "container_memory_pgscan_total": 23,
		"container_memory_pgsteal_total": 24, "container_memory_events_high_total": 9, "container_hugetlb_max_usage_bytes 2MB": 2097152,
		"container_threads_max": 100,
	}
)

// bySeries returns samples by name and labels.
func bySeries(t *testing.T, samples stats.Samples) map[string]float64 {
	t.Helper()
	all := map[string]float64{}
	for _, s := range samples {
		series := strings.Join(append([]string{s.Family.Name}, s.Labels...), " ")
		if _, twice := all[series]; twice || len(s.Labels) != len(s.Family.Labels) {
			t.Errorf("sample %s: want it once, with the labels %v", series, s.Family.Labels)
		}
		all[series] = s.Value
	}
	return all
}

func merged(all ...map[string]string) map[string]string {
	m := map[string]string{}
	for _, files := range all {
		maps.Copy(m, files)
	}
	return m
}

func TestReadAll(t *testing.T) {
	for name, c := range map[string]struct {
		root stats.Root
		want map[string]float64
	}{
		"v1": {stats.Root{Mount: tree(t, merged(v1Tree, moreV1))}, wantV1},
		"v2": {stats.Root{Mount: tree(t, merged(v2Tree, moreV2)), V2: true}, wantV2},
	} {
		t.Run(name, func(t *testing.T) {
			c.root.HugePages = []string{"2MB", "1GB"}
			f, samples, err := c.root.ReadAll(group, 0)
			if err != nil {
				t.Fatal(err)
			}
			if f.Memory.WorkingSet != 100000000 {
				t.Errorf("Figures = %+v, want those of Read", f)
			}
			want := maps.Clone(wantSamples)
			maps.Copy(want, c.want)
			got := bySeries(t, samples)
			for series, v := range want {
				if g, ok := got[series]; !ok || g != v {
					t.Errorf("%s = %v, %v; want %v", series, g, ok, v)
				}
				delete(got, series)
			}
			if len(got) > 0 {
				t.Errorf("unexpected samples: %v", got)
			}
		})
	}
}

// TestReadAllOpensEachFileOnce: a scrape reads a dozen files of every container, and memory.stat is long.
func TestReadAllOpensEachFileOnce(t *testing.T) {
	for name, root := range map[string]stats.Root{
		"v1": {Mount: tree(t, merged(v1Tree, moreV1))},
		"v2": {Mount: tree(t, merged(v2Tree, moreV2)), V2: true},
	} {
		t.Run(name, func(t *testing.T) {
			watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(watch)
			dirs := map[int32]string{}
			for _, controller := range []string{"", "cpuacct", "cpu", "memory", "pids"} {
				dir := filepath.Join(root.Mount, controller, group)
				if id, err := unix.InotifyAddWatch(watch, dir, unix.IN_OPEN); err == nil {
					dirs[int32(id)] = controller
				}
			}
			if _, _, err := root.ReadAll(group, 0); err != nil {
				t.Fatal(err)
			}
			opened := openings(t, watch, dirs)
			for file, n := range opened {
				if n != 1 {
					t.Errorf("%s was opened %d times", file, n)
				}
			}
			if opened["memory/memory.stat"]+opened["/memory.stat"] != 1 {
				t.Errorf("opened: %v, want memory.stat among them", opened)
			}
		})
	}
}

// openings counts the openings of the files in watched directories.
func openings(t *testing.T, watch int, dirs map[int32]string) map[string]int {
	t.Helper()
	events := make([]byte, 64<<10)
	n, err := unix.Read(watch, events)
	if err != nil {
		t.Fatal(err)
	}
	opened := map[string]int{}
	for events = events[:n]; len(events) > 0; {
		id, length := int32(binary.NativeEndian.Uint32(events)), binary.NativeEndian.Uint32(events[12:])
		name := strings.TrimRight(string(events[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+length]), "\x00")
		if name != "" { // otherwise, the directory itself
			opened[dirs[id]+"/"+name]++
		}
		events = events[unix.SizeofInotifyEvent+length:]
	}
	return opened
}

// TestReadAllOfAnOldKernel checks the maximum and the kernel's memory on a kernel that records neither, and that no
// sample is made up for pressure and huge pages.
func TestReadAllOfAnOldKernel(t *testing.T) {
	root := stats.Root{Mount: tree(t, map[string]string{
		group + "/cpu.stat": "usage_usec 1\n", group + "/memory.current": "4096\n", group + "/memory.max": "max\n",
		group + "/memory.stat": "kernel_stack 1\npagetables 2\npercpu 4\nslab 8\n",
	}), V2: true, HugePages: []string{"2MB"}}
	_, samples, err := root.ReadAll(group, 0)
	if err != nil {
		t.Fatal(err)
	}
	got := bySeries(t, samples)
	if got["container_memory_max_usage_bytes"] != 4096 || got["container_memory_kernel_usage"] != 15 {
		t.Errorf("samples = %v, want a maximum of 4096 and 15 bytes for the kernel", got)
	}
	for series := range got {
		if strings.HasPrefix(series, "container_pressure") || strings.HasPrefix(series, "container_hugetlb") {
			t.Errorf("sample %s, although the kernel has no such figure", series)
		}
	}
}

// TestReadAllOfProcesses checks what is counted in /proc, for a process with known descriptors.
func TestReadAllOfProcesses(t *testing.T) {
	cmd := exec.Command("sh", "-c", "ulimit -n 100; echo ready; read _")
	pair := socketPair(t)
	cmd.Stdin = pair[0]
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pair[1].Close(); _ = cmd.Wait() })
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	files := merged(v2Tree, map[string]string{group + "/cgroup.procs": strconv.Itoa(cmd.Process.Pid) + "\n4194304\n"})
	_, samples, err := stats.Root{Mount: tree(t, files), V2: true}.ReadAll(group, 0)
	if err != nil {
		t.Fatal(err)
	}
	got := bySeries(t, samples)
	open, sockets := 0.0, 0.0
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		open++
		if target, _ := os.Readlink(link); strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	if open < 3 || sockets < 1 {
		t.Fatalf("the shell has %v descriptors and %v sockets, want at least 3 and 1", open, sockets)
	}
	for series, want := range map[string]float64{
		"container_processes": 2, "container_file_descriptors": open, "container_sockets": sockets, "container_ulimits_soft max_open_files": 100,
	} {
		if got[series] != want {
			t.Errorf("%s = %v, want %v", series, got[series], want)
		}
	}
}

func TestSpec(t *testing.T) {
	for name, c := range map[string]struct {
		resources *runtimeapi.LinuxContainerResources
		want      map[string]float64
	}{
		"nothing": {nil, map[string]float64{
			"container_spec_cpu_period": 100000, "container_spec_cpu_shares": 1024, "container_spec_memory_limit_bytes": 0,
			"container_spec_memory_swap_limit_bytes": 0, "container_spec_memory_reservation_limit_bytes": 0,
		}},
		"all": {&runtimeapi.LinuxContainerResources{
			CpuPeriod: 50000, CpuQuota: 20000, CpuShares: 2, MemoryLimitInBytes: 64, MemorySwapLimitInBytes: 128,
			Unified: map[string]string{"memory.min": "32"},
		}, map[string]float64{
			"container_spec_cpu_period": 50000, "container_spec_cpu_quota": 20000, "container_spec_cpu_shares": 2,
			"container_spec_memory_limit_bytes":      64,
			"container_spec_memory_swap_limit_bytes": 128, "container_spec_memory_reservation_limit_bytes": 32,
		}},
		"unlimited": {&runtimeapi.LinuxContainerResources{
			CpuQuota: -1, MemoryLimitInBytes: -1, MemorySwapLimitInBytes: -1, Unified: map[string]string{"memory.min": "max"},
		}, map[string]float64{
			"container_spec_cpu_period": 100000, "container_spec_cpu_shares": 1024, "container_spec_memory_limit_bytes": 0,
			"container_spec_memory_swap_limit_bytes": 0, "container_spec_memory_reservation_limit_bytes": 0,
		}},
	} {
		var s stats.Samples
		s.Spec(c.resources)
		if got := bySeries(t, s); !maps.Equal(got, c.want) {
			t.Errorf("%s: samples = %v, want %v", name, got, c.want)
		}
	}
}

func TestFilesystem(t *testing.T) {
	var s stats.Samples
	s.Filesystem(t.TempDir(), &runtimeapi.UInt64Value{Value: 4096})
	seen := map[string]float64{}
	for _, x := range s {
		seen[x.Family.Name] = x.Value
		if x.Labels[0] == "" {
			t.Errorf("%s has no device", x.Family.Name)
		}
	}
	if len(seen) != 4 || seen["container_fs_usage_bytes"] != 4096 || seen["container_fs_limit_bytes"] == 0 {
		t.Errorf("samples = %v, want a usage of 4096, a size, and the inodes", seen)
	}
	s = nil
	if s.Filesystem(filepath.Join(t.TempDir(), "missing"), nil); len(s) > 0 {
		t.Errorf("samples of a missing path = %v, want none", s)
	}
}

func TestFamilies(t *testing.T) {
	names := map[string]bool{}
	for _, f := range stats.Families {
		if names[f.Name] || f.Help == "" || !strings.HasPrefix(f.Name, "container_") {
			t.Errorf("family %+v: want one of its name, with a help text", f)
		}
		names[f.Name] = true
		if total := strings.HasSuffix(f.Name, "_total"); total && f.Type != runtimeapi.MetricType_COUNTER &&
			f.Name != "container_fs_inodes_total" {
			t.Errorf("%s is not a counter", f.Name)
		}
	}
}

// BenchmarkReadAll reads all samples of a container from the real file system.
func BenchmarkReadAll(b *testing.B) {
	path, _, _ := realCgroup(b, 64<<20)
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := stats.ReadAll(path, os.Getpid()); err != nil {
			b.Fatal(err)
		}
	}
}

func socketPair(t *testing.T) (pair [2]*os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, fd := range fds {
		pair[i] = os.NewFile(uintptr(fd), "socket")
		t.Cleanup(func() { pair[i].Close() })
	}
	return pair
}
