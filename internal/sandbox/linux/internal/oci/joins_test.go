package oci

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/test/until"
)

// TestOwnTasks: the file is found on cgroup v1 and v2, and not found if the cgroup is out of sight.
func TestOwnTasks(t *testing.T) {
	root := t.TempDir()
	for _, file := range []string{"v1/pids/a/tasks", "v1/systemd/system.slice/b/tasks", "v2/system.slice/b/cgroup.procs"} {
		file = filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	v1 := cgroup.Tree{Roots: map[string]string{"pids": filepath.Join(root, "v1/pids"), "systemd": filepath.Join(root, "v1/systemd")}}
	v2 := cgroup.Tree{V2: true, Roots: map[string]string{"": filepath.Join(root, "v2")}}
	for _, c := range []struct {
		name, lines, want string
		groups            cgroup.Tree
	}{
		{"v1", "8:pids:/a\n9:name=systemd:/system.slice/b\n0::/\n", "v1/pids/a/tasks", v1},
		{"v1 named", "8:pids:/elsewhere\n9:name=systemd:/system.slice/b\n0::/\n", "v1/systemd/system.slice/b/tasks", v1},
		{"v2", "0::/system.slice/b\n", "v2/system.slice/b/cgroup.procs", v2},
		{"out of sight", "0::/../other\n", "", v2},
		{"nothing", "", "", v2},
	} {
		want := c.want
		if want != "" {
			want = filepath.Join(root, want)
		}
		if got := ownTasks(c.groups, c.lines); got != want {
			t.Errorf("%s: got %q, want %q", c.name, got, want)
		}
	}
}

// TestExpectJoin: the main thread is moved to its own cgroup, and calls at the same time are one.
func TestExpectJoin(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tasks")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	j := &Joins{file: file}
	j.pending.Store(true)
	j.Expect()
	if raw, _ := os.ReadFile(file); len(raw) > 0 {
		t.Errorf("written during an earlier call: %q", raw)
	}
	j.pending.Store(false)
	j.Expect()
	until.Holds(t, "the process is written", func() bool {
		raw, _ := os.ReadFile(file)
		return string(raw) == strconv.Itoa(os.Getpid()) && !j.pending.Load()
	})
}
