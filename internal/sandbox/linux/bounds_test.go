package linux

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
)

// TestFaultC10FilledPodFiles: a container writes to each file that the pod provides until the write fails. That happens
// soon, the memory is charged to its own cgroup, and the run directory's file system is unaffected.
func TestFaultC10FilledPodFiles(t *testing.T) {
	const etcSpare, shmSize = 1 << 20, 64 << 20 // as package shared allows
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever).start()
		c.waitLog("up")
		h, _ := r.ledger.Find(p.ID, c.ID)
		s, _ := h.Snapshot()
		beforeMemory := memoryOf(t, r, s.Cgroup)
		written := 0
		for _, f := range []struct {
			name        string
			least, most int
		}{
			{"/etc/hosts", etcSpare / 2, 2 * etcSpare}, {"/etc/hostname", 0, 2 * etcSpare}, {"/etc/resolv.conf", 0, 2 * etcSpare},
			{"/dev/shm/x", shmSize, shmSize},
		} {
			size, err := strconv.Atoi(c.exec("dd if=/dev/zero of=" + f.name + " bs=1M count=80 2>/dev/null; stat -c %s " + f.name))
			if err != nil || size < f.least || size > f.most {
				t.Errorf("size of %s: got %d bytes, error %v; want %d to %d bytes", f.name, size, err, f.least, f.most)
			}
			written += size
		}
		if charged := memoryOf(t, r, s.Cgroup) - beforeMemory; charged < written/2 {
			t.Errorf("memory charged to the container: got %d bytes of %d written, want at least half", charged, written)
		}
		for _, name := range []string{"hosts", "hostname", "resolv.conf"} {
			var pod, run unix.Stat_t
			if err := unix.Stat(filepath.Join(r.cfg.podRunDir(p.ID), "etc", name), &pod); err != nil {
				t.Fatal(err)
			}
			if err := unix.Stat(r.cfg.RunDir, &run); err != nil {
				t.Fatal(err)
			}
			if pod.Dev == run.Dev {
				t.Errorf("%s is on the file system of the run directory, want a file system of its own", name)
			}
		}
		c.exec("rm /dev/shm/x; echo 127.0.0.1 again >/etc/hosts; grep -q again /etc/hosts")
	})
}

// memoryOf returns the memory use of a cgroup in bytes.
func memoryOf(t *testing.T, r *rig, cgroup string) int {
	t.Helper()
	file := "memory.usage_in_bytes"
	if r.cgroups.V2 {
		file = "memory.current"
	}
	raw, err := os.ReadFile(filepath.Join(r.cgroups.Roots[r.cgroups.Hierarchy("memory")], cgroup, file))
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestRecoverFilesForEtc: if a pod's files for /etc are missing, as after an upgrade, the daemon's start recreates
// them. The pod's containers keep running, and new containers get the files.
func TestRecoverFilesForEtc(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod()
	old := p.container(forever).start()
	old.waitLog("up")
	if err := mnt.RemovePoint(filepath.Join(r.cfg.podRunDir(p.ID), "etc")); err != nil {
		t.Fatal(err)
	}
	if found := r.restart(p.known(old)); !found.Sandboxes[p.ID] {
		t.Error("Recover did not find the sandbox")
	}
	if got := p.container(forever).start().exec("cat /etc/hostname"); got != p.Config.Hostname {
		t.Errorf("/etc/hostname: got %q, want %q", got, p.Config.Hostname)
	}
	old.stop(time.Second)
}

// TestFaultC10LogFlood: the log of a container that writes as fast as it can stays within its limit without rotation.
// It keeps whole lines, including the newest.
func TestFaultC10LogFlood(t *testing.T) {
	const most = 1 << 20
	r := newRig(t, "crun")
	r.cfg.LogSizeMax = most
	r.restart()
	// About 4 MB, several times the limit of 1 MiB.
	c := r.pod().container("i=0; while test $i -lt 60000; do echo line $i of a flood; i=$((i+1)); done").start()
	c.waitExit()
	raw, err := os.ReadFile(c.logFile())
	if err != nil || len(raw) > most {
		t.Errorf("size of the log: got %d bytes, error %v; want at most %d bytes", len(raw), err, most)
	}
	text := string(raw)
	if !strings.HasSuffix(text, "\n") || !strings.Contains(text, "line 59999 of a flood\n") {
		t.Errorf("end of the log: got %q, want the last line written", text[max(0, len(text)-200):])
	}
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) < 4 || f[1] != "stdout" || f[2] != "F" && f[2] != "P" {
			t.Fatalf("log line %q is not complete", line)
		}
	}
}
