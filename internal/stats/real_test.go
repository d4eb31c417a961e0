package stats_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/stats"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// realCgroup creates a cgroup with a memory limit, in the host's hierarchies that this package reads. join moves a
// process into it. remove removes the cgroup, which otherwise happens at the end of the test.
func realCgroup(t testing.TB, limit int) (path string, join func(pid int), remove func()) {
	t.Helper()
	v2, err := cgroup.IsV2()
	if err != nil {
		t.Fatal(err)
	}
	path = fmt.Sprintf("%s/tripod-stats-test-%d", testns.Cgroup(), os.Getpid())
	controllers, limitFile := []string{"cpuacct", "memory", "pids"}, "memory.limit_in_bytes"
	if v2 {
		controllers, limitFile = []string{""}, "memory.max"
	}
	var dirs []string
	for _, controller := range controllers {
		dir := filepath.Join(cgroup.Mount, controller, path)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, dir)
		file := filepath.Join(dir, limitFile)
		if _, err := os.Stat(file); err == nil {
			write(t, file, limit)
		}
	}
	join = func(pid int) {
		for _, dir := range dirs {
			write(t, filepath.Join(dir, "cgroup.procs"), pid)
		}
	}
	remove = func() {
		for _, dir := range dirs {
			if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
				t.Error(err)
			}
		}
	}
	t.Cleanup(remove)
	return path, join, remove
}

func write(t testing.TB, file string, number int) {
	t.Helper()
	if err := os.WriteFile(file, []byte(strconv.Itoa(number)), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestRealCgroup checks the figures of a program that uses CPU time and memory in a real cgroup, and that a removed
// cgroup is not found.
func TestRealCgroup(t *testing.T) {
	const limit = 64 << 20
	path, join, remove := realCgroup(t, limit)
	before, err := stats.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	runIn(t, join, `i=0; s=xxxxxxxxxxxxxxxx; while [ $i -lt 19 ]; do i=$((i+1)); s=$s$s; done; echo ready; read _`, func() {
		f, err := stats.Read(path)
		if err != nil {
			t.Fatal(err)
		}
		if f.CPU <= before.CPU {
			t.Errorf("CPU = %d ns, want more than %d ns", f.CPU, before.CPU)
		}
		if f.Memory.Usage == 0 || f.Memory.RSS == 0 || f.Memory.PageFaults == 0 {
			t.Errorf("Memory = %+v, want usage, RSS and page faults", f.Memory)
		}
		if available, ok := f.Memory.Available(); !ok || f.Memory.Limit != limit || available > limit {
			t.Errorf("Limit = %d with %d available, want a limit of %d", f.Memory.Limit, available, limit)
		}
		if f.Processes != 1 {
			t.Errorf("Processes = %d, want 1", f.Processes)
		}
	})
	if n, err := stats.OOMKills(path); n != 0 || err != nil {
		t.Errorf("OOMKills = %d, %v, want 0", n, err)
	}
	remove()
	if _, err := stats.Read(path); !errdefs.IsNotFound(err) {
		t.Errorf("Read of a removed cgroup = %v, want not found", err)
	}
}

// TestRealOOMKill checks that OOMKills counts a process that the kernel's OOM killer killed.
func TestRealOOMKill(t *testing.T) {
	path, join, _ := realCgroup(t, 4<<20)
	cmd := exec.Command("sh", "-c", `read _; exec tail -n1 /dev/zero`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	join(cmd.Process.Pid)
	in.Close()
	if err := cmd.Wait(); err == nil {
		t.Fatal("a program without a memory limit of its own was not killed in a cgroup of 4 MiB")
	}
	if n, err := stats.OOMKills(path); n != 1 || err != nil {
		t.Errorf("OOMKills = %d, %v, want 1", n, err)
	}
}

// runIn runs a shell script in the cgroup and calls check after the script has printed "ready".
func runIn(t *testing.T, join func(pid int), script string, check func()) {
	t.Helper()
	cmd := exec.Command("sh", "-c", "read _; "+script)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer in.Close()
	join(cmd.Process.Pid)
	fmt.Fprintln(in)
	word := make([]byte, 16)
	if n, err := out.Read(word); err != nil || !bytes.HasPrefix(word[:n], []byte("ready")) {
		t.Fatalf("the script printed %q, %v, want \"ready\"", word[:n], err)
	}
	check()
}

// BenchmarkRead reads a container's figures from the real file system. The limit is 150 µs.
func BenchmarkRead(b *testing.B) {
	path, _, _ := realCgroup(b, 64<<20)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := stats.Read(path); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkReadV2 reads the fake v2 tree.
func BenchmarkReadV2(b *testing.B) {
	root := stats.Root{Mount: tree(b, v2Tree), V2: true}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := root.Read(group); err != nil {
			b.Fatal(err)
		}
	}
}
