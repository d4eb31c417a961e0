package oci

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// sharedVolumes returns a backend whose pod "p" has a share. It must be run by hack/testns.sh, because it mounts.
func sharedVolumes(t *testing.T, runDir string) *Backend {
	t.Helper()
	if testns.Cgroup() == "" {
		t.Fatal("run by hack/testns.sh: the test mounts")
	}
	o := &Backend{cfg: vm.Config{RunDir: runDir}}
	t.Cleanup(func() {
		if err := o.removeShared("p"); err != nil {
			t.Error(err)
		}
		if left := mountsBelow(t, runDir); left != 0 {
			t.Errorf("mounts left: got %d, want none", left)
		}
	})
	if err := o.makeShared("p"); err != nil {
		t.Fatal(err)
	}
	return o
}

// mountsBelow counts the mounts at and below a directory, also those that others cover.
func mountsBelow(t *testing.T, dir string) (count int) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if strings.HasPrefix(strings.Fields(line)[4]+"/", dir+"/") {
			count++
		}
	}
	return count
}

func share(t *testing.T, o *Backend, id string, m *runtimeapi.Mount) string {
	t.Helper()
	type answer struct {
		path string
		err  error
	}
	done := make(chan answer, 1)
	go func() {
		path, err := o.shareVolume("p", id, m)
		done <- answer{path, err}
	}()
	select {
	case a := <-done:
		if a.err != nil {
			t.Fatalf("container %s mounts %v: %v", id, m, a.err)
		}
		return a.path
	case <-time.After(20 * time.Second):
		t.Fatalf("container %s mounts %v: it blocks", id, m)
	}
	return ""
}

// TestVolumesOfEachType: two containers share one mount of a source, whatever the source is, also if the directories of the
// backend are behind a symlink and if the daemon starts again in between. The mount goes with the last of them.
func TestVolumesOfEachType(t *testing.T) {
	dir := t.TempDir()
	source := func(name string) string { return filepath.Join(dir, name) }
	if err := os.Mkdir(source("directory"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(source("file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(source("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	socket, err := net.Listen("unix", source("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if err := os.Symlink("directory", source("link")); err != nil {
		t.Fatal(err)
	}
	real, linked := t.TempDir(), filepath.Join(t.TempDir(), "run")
	if err := os.Symlink(real, linked); err != nil {
		t.Fatal(err)
	}
	for _, runDir := range []string{real, linked} {
		for _, name := range []string{"directory", "file", "fifo", "socket", "link"} {
			t.Run(filepath.Base(runDir)+" "+name, func(t *testing.T) {
				o := sharedVolumes(t, runDir)
				m := &runtimeapi.Mount{HostPath: source(name)}
				first := share(t, o, "a", m)
				if err := o.makeShared("p"); err != nil {
					t.Fatal(err)
				}
				if second := share(t, o, "b", m); second != first {
					t.Errorf("mounts of two containers: got %s and %s, want one", first, second)
				}
				if got := mountsBelow(t, runDir); got != 2 {
					t.Errorf("mounts: got %d, want that of the share and that of the volume", got)
				}
				for i, id := range []string{"a", "b"} {
					if err := o.unshareContainer("p", id); err != nil {
						t.Fatal(err)
					}
					if got := mountsBelow(t, runDir); got != 2-i {
						t.Errorf("mounts after container %s: got %d, want %d", id, got, 2-i)
					}
				}
			})
		}
	}
}

// TestVolumesOfDifferentRights: a container uses a mount of its source that allows what it asks for. The guest never gets more
// than a container has asked for.
func TestVolumesOfDifferentRights(t *testing.T) {
	const live = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	read, write := &runtimeapi.Mount{Readonly: true}, &runtimeapi.Mount{}
	readLive, writeLive := &runtimeapi.Mount{Readonly: true, Propagation: live}, &runtimeapi.Mount{Propagation: live}
	for name, c := range map[string]struct {
		asked  []*runtimeapi.Mount
		mounts int
	}{
		"write, then read":                 {[]*runtimeapi.Mount{write, read, read}, 1},
		"read, then write":                 {[]*runtimeapi.Mount{read, write, read}, 2}, // documented in docs/vm-oci.md
		"propagation, then none":           {[]*runtimeapi.Mount{writeLive, write, read, readLive}, 1},
		"none, then propagation":           {[]*runtimeapi.Mount{write, writeLive, write}, 2},
		"read with propagation, then none": {[]*runtimeapi.Mount{readLive, read}, 1},
		"neither allows the other":         {[]*runtimeapi.Mount{write, readLive, read}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			o, source := sharedVolumes(t, t.TempDir()), t.TempDir()
			paths := map[string]bool{}
			for i, m := range c.asked {
				m := &runtimeapi.Mount{HostPath: source, Readonly: m.Readonly, Propagation: m.Propagation}
				path := share(t, o, string(rune('a'+i)), m)
				paths[path] = true
				err := os.WriteFile(filepath.Join(o.sharedDir("p"), strings.TrimPrefix(path, guestapi.Shared), "x"), nil, 0o600)
				if err != nil && !m.Readonly {
					t.Errorf("container %d asked for a writable mount: %v", i, err)
				}
				if err == nil && m.Readonly && len(paths) == 1 && c.asked[0].Readonly {
					t.Errorf("container %d: the guest can write, for which no container has asked", i)
				}
			}
			if len(paths) != c.mounts {
				t.Errorf("mounts: got %d, want %d", len(paths), c.mounts)
			}
		})
	}
}
