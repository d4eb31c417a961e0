package stats_test

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/stats"
)

const group = "/kubepods/pod1/abc"

// v1Tree holds a container's figures as Linux 6.18 shows them on cgroup v1.
var v1Tree = map[string]string{
	"cpuacct" + group + "/cpuacct.usage":              "123456789012\n",
	"memory" + group + "/memory.usage_in_bytes":       "104857600\n",
	"memory" + group + "/memory.limit_in_bytes":       "209715200\n",
	"memory" + group + "/memory.memsw.limit_in_bytes": "314572800\n",
	"memory" + group + "/memory.oom_control":          "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
	"memory" + group + "/memory.stat": "cache 1\nrss 2\nhierarchical_memory_limit 209715200\n" +
		"total_cache 50000000\ntotal_rss 40000000\ntotal_mapped_file 3000000\ntotal_pgfault 4000\ntotal_pgmajfault 5\n" +
		"total_inactive_file 4857600\ntotal_swap 1000000\n",
	"pids" + group + "/pids.current": "12\n",
}

// v2Tree holds the same figures on cgroup v2.
var v2Tree = map[string]string{
	group + "/cpu.stat": "usage_usec 123456789\nuser_usec 55780\nsystem_usec 27360\nnice_usec 0\ncore_sched.force_idle_usec 0\n" +
		"nr_periods 100\nnr_throttled 7\nthrottled_usec 900\nnr_bursts 0\nburst_usec 0\n",
	group + "/memory.current":      "104857600\n",
	group + "/memory.max":          "209715200\n",
	group + "/memory.swap.current": "1000000\n",
	group + "/memory.swap.max":     "104857600\n",
	group + "/memory.events":       "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n",
	group + "/memory.stat": "anon 40000000\nfile 50000000\nkernel 1048576\nkernel_stack 16384\npagetables 4096\npercpu 0\nslab 524288\n" +
		"file_mapped 3000000\ninactive_file 4857600\nworkingset_refault_anon 0\npgfault 4000\npgmajfault 5\n",
	group + "/pids.current":    "12\n",
	group + "/cpu.pressure":    "some avg10=1.53 avg60=0.87 avg300=0.25 total=77\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
	group + "/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2\n",
	group + "/io.pressure":     "some avg10=0.00 avg60=0.00 avg300=0.00 total=3\nfull avg10=100.00 avg60=50.50 avg300=1.00 total=4\n",
}

// tree writes files to a new directory and returns its path.
func tree(t testing.TB, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func read(t *testing.T, root stats.Root) stats.Figures {
	t.Helper()
	f, err := root.Read(group)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// want returns the figures in both trees.
func want() stats.Figures {
	return stats.Figures{
		CPU: 123456789000,
		Memory: stats.Memory{
			Usage: 104857600, WorkingSet: 100000000, RSS: 40000000, PageFaults: 4000, MajorPageFaults: 5, Limit: 209715200,
			Swap: &stats.Swap{Usage: 1000000, Limit: 104857600},
		},
		Processes: 12,
	}
}

func same(t *testing.T, got, want stats.Figures) {
	t.Helper()
	if got.Time.IsZero() {
		t.Error("Time is zero")
	}
	got.Time = time.Time{}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("Read = %+v\nwant   %+v", got, want)
	}
}

func TestReadV2(t *testing.T) {
	w := want()
	w.PSI = stats.PSI{
		CPU:    &stats.Pressure{Some: stats.Stall{Total: 77000, Avg10: 1.53, Avg60: 0.87, Avg300: 0.25}},
		Memory: &stats.Pressure{Some: stats.Stall{Total: 1000}, Full: stats.Stall{Total: 2000}},
		IO:     &stats.Pressure{Some: stats.Stall{Total: 3000}, Full: stats.Stall{Total: 4000, Avg10: 100, Avg60: 50.5, Avg300: 1}},
	}
	same(t, read(t, stats.Root{Mount: tree(t, v2Tree), V2: true}), w)
}

func TestReadV1(t *testing.T) {
	w := want()
	w.CPU = 123456789012
	same(t, read(t, stats.Root{Mount: tree(t, v1Tree)}), w)
}

// TestReadV1Hybrid checks that on a hybrid host the pressure is read from the v2 hierarchy.
func TestReadV1Hybrid(t *testing.T) {
	files := map[string]string{"unified" + group + "/io.pressure": v2Tree[group+"/io.pressure"]}
	for name, content := range v1Tree {
		files[name] = content
	}
	f := read(t, stats.Root{Mount: tree(t, files)})
	if f.PSI.CPU != nil || f.PSI.IO == nil || f.PSI.IO.Full.Avg60 != 50.5 {
		t.Errorf("PSI = %+v, want only the I/O pressure of the v2 hierarchy", f.PSI)
	}
}

// TestReadWhatIsThere checks that Read returns the figures that exist, although files are missing as on an old kernel
// or on a host with few controllers.
func TestReadWhatIsThere(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		root  stats.Root
	}{
		"v1": {map[string]string{
			"cpuacct" + group + "/cpuacct.usage":        "5\n",
			"memory" + group + "/memory.usage_in_bytes": "4096\n",
			"memory" + group + "/memory.limit_in_bytes": "9223372036854771712\n",
			"memory" + group + "/memory.stat":           "total_inactive_file 8192\n",
		}, stats.Root{}},
		"v2": {map[string]string{
			group + "/cpu.stat":       "usage_usec 1\n",
			group + "/memory.current": "4096\n",
			group + "/memory.max":     "max\n",
			group + "/memory.stat":    "inactive_file 8192\n",
		}, stats.Root{V2: true}},
	} {
		t.Run(name, func(t *testing.T) {
			c.root.Mount = tree(t, c.files)
			f := read(t, c.root)
			if f.CPU == 0 || f.Memory.Usage != 4096 {
				t.Errorf("Read = %+v, want CPU time and a memory usage of 4096", f)
			}
			if f.Memory.WorkingSet != 0 {
				t.Errorf("WorkingSet = %d, want 0 if the inactive cache exceeds the usage", f.Memory.WorkingSet)
			}
			if _, ok := f.Memory.Available(); ok || f.Memory.Limit != stats.Unlimited || f.MemoryUsage().AvailableBytes != nil {
				t.Errorf("Limit = %d, want Unlimited, and nothing reported as available", f.Memory.Limit)
			}
			if f.Memory.Swap != nil || f.SwapUsage() != nil {
				t.Error("swap is reported, although it is not accounted")
			}
			if f.IOUsage().Psi != nil || f.CPUUsage().Psi != nil || f.MemoryUsage().Psi != nil {
				t.Error("pressure is reported, although the kernel does not offer it")
			}
		})
	}
}

func TestGone(t *testing.T) {
	for name, root := range map[string]stats.Root{
		"v1": {Mount: tree(t, v1Tree)},
		"v2": {Mount: tree(t, v2Tree), V2: true},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := root.Read("/kubepods/nobody"); !errdefs.IsNotFound(err) {
				t.Errorf("Read of an unknown cgroup = %v, want not found", err)
			}
			if _, err := root.Read(group); err != nil {
				t.Fatal(err)
			}
			if err := os.RemoveAll(filepath.Join(root.Mount, "memory", group)); err != nil {
				t.Fatal(err)
			}
			if err := os.RemoveAll(filepath.Join(root.Mount, group)); err != nil {
				t.Fatal(err)
			}
			if _, err := root.Read(group); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), group) {
				t.Errorf("Read of a removed cgroup = %v, want not found with the cgroup's path", err)
			}
			if _, err := root.OOMKills(group); !errdefs.IsNotFound(err) {
				t.Errorf("OOMKills of a removed cgroup = %v, want not found", err)
			}
		})
	}
}

func TestRefusesOtherPaths(t *testing.T) {
	root := stats.Root{Mount: tree(t, v2Tree), V2: true}
	for _, path := range []string{"", "kubepods", "/kubepods/../..", "/kubepods//pod1", "/kubepods/", "/.."} {
		if _, err := root.Read(path); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Read(%q) = %v, want an invalid argument", path, err)
		}
		if _, err := root.OOMKills(path); !errdefs.IsInvalidArgument(err) {
			t.Errorf("OOMKills(%q) = %v, want an invalid argument", path, err)
		}
	}
}

func TestJunkIsAnError(t *testing.T) {
	files := map[string]string{group + "/memory.current": "many\n"}
	root := stats.Root{Mount: tree(t, files), V2: true}
	if _, err := root.Read(group); err == nil || !strings.Contains(err.Error(), "memory.current") {
		t.Errorf("Read with junk in memory.current = %v, want an error that names the file", err)
	}
}

func TestOOMKills(t *testing.T) {
	for name, root := range map[string]stats.Root{
		"v1": {Mount: tree(t, v1Tree)},
		"v2": {Mount: tree(t, v2Tree), V2: true},
	} {
		if n, err := root.OOMKills(group); n != 2 || err != nil {
			t.Errorf("%s: OOMKills = %d, %v, want 2", name, n, err)
		}
	}
}

// TestLongFile checks that a file longer than the buffer is read to its end.
func TestLongFile(t *testing.T) {
	files := map[string]string{
		group + "/memory.current": "4096\n",
		group + "/memory.stat":    strings.Repeat("some_counter_of_a_later_kernel 1\n", 2000) + "anon 4096\n",
	}
	if f := read(t, stats.Root{Mount: tree(t, files), V2: true}); f.Memory.RSS != 4096 {
		t.Errorf("RSS = %d, want 4096", f.Memory.RSS)
	}
}

func TestMessages(t *testing.T) {
	f := read(t, stats.Root{Mount: tree(t, v2Tree), V2: true})
	at := f.Time.UnixNano()
	cpu, mem, swap, pids, io := f.CPUUsage(), f.MemoryUsage(), f.SwapUsage(), f.ProcessUsage(), f.IOUsage()
	for name, pair := range map[string][2]uint64{
		"cpu":         {cpu.UsageCoreNanoSeconds.Value, 123456789000},
		"cpu psi":     {cpu.Psi.Some.Total, 77000},
		"usage":       {mem.UsageBytes.Value, 104857600},
		"working set": {mem.WorkingSetBytes.Value, 100000000},
		"available":   {mem.AvailableBytes.Value, 109715200},
		"rss":         {mem.RssBytes.Value, 40000000},
		"faults":      {mem.PageFaults.Value, 4000},
		"major":       {mem.MajorPageFaults.Value, 5},
		"memory psi":  {mem.Psi.Full.Total, 2000},
		"swap":        {swap.SwapUsageBytes.Value, 1000000},
		"swap left":   {swap.SwapAvailableBytes.Value, 103857600},
		"processes":   {pids.ProcessCount.Value, 12},
		"io psi":      {io.Psi.Full.Total, 4000},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %d, want %d", name, pair[0], pair[1])
		}
	}
	if cpu.UsageNanoCores != nil {
		t.Error("CPUUsage has a rate, although there is only one sample")
	}
	for _, ts := range []int64{cpu.Timestamp, mem.Timestamp, swap.Timestamp, pids.Timestamp, io.Timestamp} {
		if ts != at || ts <= 0 {
			t.Errorf("timestamp %d, want %d", ts, at)
		}
	}
}
