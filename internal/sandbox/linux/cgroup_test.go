package linux

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

func podWithParent(parent string) *sandbox.Pod {
	return &sandbox.Pod{ID: strings.Repeat("a", 64),
		Config: &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: parent}}}
}

func TestCgroupNames(t *testing.T) {
	pod, id := strings.Repeat("a", 64), strings.Repeat("b", 64)
	for _, test := range []struct {
		driver, base, parent string
		pod                  string
		ours                 bool
		oci, container       string
	}{
		{cgroup.DriverCgroupfs, "/tripod", "", "/tripod/tripod-" + pod, true,
			"/tripod/tripod-" + pod + "/tripod-" + id, "/tripod/tripod-" + pod + "/tripod-" + id},
		{cgroup.DriverCgroupfs, "/tripod", "/kubepods/burstable/pod1", "/kubepods/burstable/pod1/tripod-" + pod, true,
			"/kubepods/burstable/pod1/tripod-" + pod + "/tripod-" + id, "/kubepods/burstable/pod1/tripod-" + pod + "/tripod-" + id},
		{cgroup.DriverSystemd, "tripod.slice", "", "/tripod.slice/tripod-" + pod + ".slice", true,
			"tripod-" + pod + ".slice:tripod:" + id, "/tripod.slice/tripod-" + pod + ".slice/tripod-" + id + ".scope"},
		{cgroup.DriverSystemd, "tripod.slice", "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice",
			"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice", false,
			"kubepods-burstable-pod1.slice:tripod:" + id,
			"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/tripod-" + id + ".scope"},
	} {
		g := cgroups{cgroup.Tree{Driver: test.driver, Parent: test.base}}
		p := podWithParent(test.parent)
		if dir, ours := g.pod(p); dir != test.pod || ours != test.ours {
			t.Errorf("%s, parent %q: pod() = %s, %v, want %s, %v", test.driver, test.parent, dir, ours, test.pod, test.ours)
		}
		if oci, dir := g.container(p, id); oci != test.oci || dir != test.container {
			t.Errorf("%s, parent %q: container() = %s, %s, want %s, %s", test.driver, test.parent, oci, dir, test.oci, test.container)
		}
	}
}

func TestCgroupParentForm(t *testing.T) {
	for driver, parents := range map[string]map[string]bool{
		cgroup.DriverCgroupfs: {"": true, "/a/b": true, "a": false, "/a/../b": false, "x.slice": false},
		cgroup.DriverSystemd:  {"": true, "a.slice": true, "/a.slice/a-b.slice": true, "/a/b": false, "a--b.slice": false},
	} {
		for parent, ok := range parents {
			err := cgroups{cgroup.Tree{Driver: driver}}.ValidParent(parent)
			if ok != (err == nil) || err != nil && !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s: ValidParent(%q) = %v, want success %v or ErrInvalidArgument", driver, parent, err, ok)
			}
		}
	}
}

// TestPodLimitsV2 sets a pod's limits in a simulated cgroup v2 tree.
func TestPodLimitsV2(t *testing.T) {
	root := t.TempDir()
	g := cgroups{cgroup.Tree{Driver: cgroup.DriverCgroupfs, Parent: "/tripod", V2: true, Roots: map[string]string{"": root}}}
	p := podWithParent("")
	p.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 100, CpuQuota: 5000, CpuPeriod: 10000, CpuShares: 1024}
	p.Config.Linux.Overhead = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 11, CpuQuota: 500, CpuPeriod: 10000}
	if err := g.limit(p); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	dir, _ := g.pod(p)
	for name := range map[string]string{"memory.max": "", "cpu.max": "", "cpu.weight": ""} {
		raw, err := os.ReadFile(filepath.Join(root, dir, name))
		if err != nil {
			t.Fatal(err)
		}
		got[name] = string(raw)
	}
	if want := map[string]string{"memory.max": "111", "cpu.max": "5500 10000", "cpu.weight": "39"}; !reflect.DeepEqual(got, want) {
		t.Errorf("limits: got %v, want %v", got, want)
	}
	for _, above := range []string{root, filepath.Join(root, "tripod")} {
		if raw, err := os.ReadFile(filepath.Join(above, "cgroup.subtree_control")); err != nil || string(raw) != "+cpu" {
			t.Errorf("cgroup.subtree_control in %s: got %q, error %v; want +cpu", above, raw, err)
		}
	}
	// A caller that names a parent limits the pod there.
	p.Config.Linux.CgroupParent = "/kubepods/pod1"
	if err := g.limit(p); err != nil || ledger.Exists(filepath.Join(root, "kubepods")) {
		t.Errorf("limit with a parent: error %v, want no error and no new cgroup", err)
	}
}

// TestHierarchies: cgroup v1 controllers are found whether cpu and cpuacct are mounted together or separately.
func TestHierarchies(t *testing.T) {
	for name, roots := range map[string]map[string]string{
		"apart": {"cpu": t.TempDir(), "cpuacct": "/none", "memory": "/none"}, "together": {"cpu,cpuacct": t.TempDir(), "memory": "/none"},
	} {
		g := cgroups{cgroup.Tree{Driver: cgroup.DriverCgroupfs, Parent: "/tripod", Roots: roots}}
		p := podWithParent("")
		p.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuShares: 1024}
		if err := g.limit(p); err != nil {
			t.Errorf("%s: limit: %v", name, err)
		}
		dir, _ := g.pod(p)
		if err := g.Apply(dir, g.Limits(&runtimeapi.LinuxContainerResources{CpuQuota: -1}, nil)); err != nil {
			t.Errorf("%s: lift the quota: %v", name, err)
		}
		for file, want := range map[string]string{"cpu.shares": "1024", "cpu.cfs_quota_us": "-1"} {
			if raw, err := os.ReadFile(filepath.Join(g.Roots[g.Hierarchy("cpu")], dir, file)); string(raw) != want {
				t.Errorf("%s: %s: got %q, error %v; want %s", name, file, raw, err, want)
			}
		}
	}
}

func TestContainerOfKey(t *testing.T) {
	id := strings.Repeat("b", 64)
	for key, want := range map[string]string{
		"linux-" + id: id, "linux-" + id + "-volume-3": id, id: "", "vm-" + id: "", "linux-x": "", "": "",
	} {
		if got := containerOfKey(key); got != want {
			t.Errorf("containerOfKey(%q) = %q, want %q", key, got, want)
		}
	}
}

// TestStateVersion: a file of another version is refused; a damaged one counts as missing.
func TestStateVersion(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "state.json")
	for content, is := range map[string]func(error) bool{
		`{"version":99,"phase":"running"}`: errdefs.IsFailedPrecondition,
		`{"version":1,"pha`:                errdefs.IsNotFound,
		``:                                 errdefs.IsNotFound,
	} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		var s state
		if err := format.Read(name, &s); !is(err) {
			t.Errorf("Read of a file with %q: error %v has the wrong class", content, err)
		}
	}
}

// TestN10ProcessIdentity: a PID alone identifies no process.
func TestN10ProcessIdentity(t *testing.T) {
	start, err := process.StartTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	p, err := process.Adopt(process.ID{Pid: os.Getpid(), Start: start})
	if err != nil || !p.Alive() {
		t.Fatalf("Adopt of this process: error %v, want a live process", err)
	}
	p.Close()
	for _, other := range []process.ID{{Pid: os.Getpid(), Start: start + 1}, {}, {Pid: 1 << 22}} {
		if _, err := process.Adopt(other); !errdefs.IsNotFound(err) {
			t.Errorf("Adopt(%+v): got error %v, want ErrNotFound", other, err)
		}
	}
}
