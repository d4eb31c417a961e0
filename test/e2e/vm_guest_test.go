package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestVMNeighbours: two machines of a node reach each other by ICMP and by HTTP, know their names, variables and
// addresses, and have stats.
func TestVMNeighbours(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	a := d.RunVM(t, &harness.PodSpec{Name: "alice", Image: harness.Guest})
	b := d.RunVM(t, &harness.PodSpec{Name: "bob", Image: harness.Guest,
		Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
			c.Envs = []*runtimeapi.KeyValue{{Key: "GREETING", Value: []byte("it's $me \"quoted\"")}}
			c.Args = []string{"tripod.noshell"}
		}}})
	a.WaitGuest()
	if r := b.WaitGuest(); r.Host != "bob" || r.Seed != "nocloud" || r.Net != "config" {
		t.Errorf("report of bob's guest: got %+v, want host bob, seed nocloud, network config", r)
	}
	waitAgent(t, d, a)
	waitAgent(t, d, b)
	if out := a.Must("ping", "-c", "20", "-i", "0.1", "-q", b.Pod.IP()); !strings.Contains(out, "20 packets received") {
		t.Errorf("output of ping: got %q, want 20 packets received", out)
	}
	if out := a.Must("wget", "-q", "-O", "-", "http://"+b.Pod.IP()+"/"); !strings.Contains(out, "hello from bob") {
		t.Errorf("output of wget: got %q, want \"hello from bob\"", out)
	}
	if out := b.Must("sh", "-c", "echo $GREETING; cat /proc/cmdline"); !strings.Contains(out, `it's $me "quoted"`) ||
		!strings.Contains(out, "tripod.noshell") {
		t.Errorf("environment and command line: got %q, want the pod's variable and tripod.noshell", out)
	}
	metrics := checkMetrics(t, d, a,
		slices.DeleteFunc(slices.Clone(knownMetrics), func(name string) bool { return name == "container_spec_cpu_quota" }), cgroupMetrics,
		diskMetrics)
	checkDescribed(t, d, a, except("container_spec_cpu_quota"))
	if metrics["container_fs_reads_bytes_total,device=cidata"] == 0 {
		t.Errorf("metrics: got %v, want the bytes that the guest has read from its disk cidata", metrics)
	}
	stats, err := d.CRI().ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: a.ID})
	if err != nil || stats.Stats.GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 {
		t.Errorf("stats: got %v, error %v; want CPU", stats, err)
	}
	memory := stats.GetStats().GetMemory()
	available, used := memory.GetAvailableBytes().GetValue(), memory.GetUsageBytes().GetValue()
	if available == 0 || used == 0 || available+used != 128<<20 || memory.GetWorkingSetBytes().GetValue() != used {
		t.Errorf("memory: got %v, want the guest's 128 MiB as available and in use", memory)
	}
}

// TestVMDisk: a machine boots from its image's disk. Its writes survive a restart, but not into the next attempt.
func TestVMDisk(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.DiskGuest})
	c.WaitGuest()
	waitAgent(t, d, c)
	c.Must("sh", "-c", "echo kept >/disk/note; sync")
	c.Stop(30 * time.Second)
	c.Start()
	c.WaitGuestBoot(2)
	waitAgent(t, d, c)
	if out := c.Must("cat", "/disk/note"); out != "kept\n" {
		t.Errorf("file on the disk after the restart: got %q, want kept", out)
	}
	c.Stop(30 * time.Second)
	next := harness.ContainerConfig("c", harness.DiskGuest)
	next.Metadata.Attempt = 1
	again := c.Pod.Run(next)
	waitAgent(t, d, again)
	if _, _, code := again.ExecSync("test", "-e", "/disk/note"); code == 0 {
		t.Error("the next attempt's disk has the file of the first, want a new disk")
	}
}

// TestVMShares: if the pod requests it, cloud-init's script for every boot mounts directories with 9p, and read-only
// volumes read-only.
func TestVMShares(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.default_memory", 256<<20))
	open, closed := shareDir(t, "open"), shareDir(t, "closed")
	by9p := func(p *runtimeapi.PodSandboxConfig) {
		p.Annotations = map[string]string{"tripod.dev/vm.share-driver": "9p"}
	}
	c := d.RunVM(t, &harness.PodSpec{Image: harness.FullGuest, Pod: []harness.PodOption{by9p},
		Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
			c.Mounts = []*runtimeapi.Mount{{HostPath: open, ContainerPath: "/open"}, {HostPath: closed, ContainerPath: "/closed", Readonly: true}}
		}}})
	c.WaitGuest()
	waitAgent(t, d, c)
	c.Must("grep", " 9p ", "/proc/mounts")
	if out := c.Must("cat", "/open/name", "/closed/name"); out != "open\nclosed\n" {
		t.Errorf("files in the shares: got %q, want open and closed", out)
	}
	c.Must("sh", "-c", "echo from the guest >/open/note")
	if note, err := os.ReadFile(filepath.Join(open, "note")); err != nil || string(note) != "from the guest\n" {
		t.Errorf("the guest's file on the node: got %q, error %v", note, err)
	}
	if _, _, code := c.ExecSync("sh", "-c", "echo no >/closed/note"); code == 0 {
		t.Error("write to a read-only share succeeded, want an error")
	}
}

// shareDir creates a directory with a file that contains its name.
func shareDir(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(harness.Dir(), "share-"+name)
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "name"), []byte(name+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}
