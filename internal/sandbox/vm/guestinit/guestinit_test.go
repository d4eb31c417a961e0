package guestinit

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/until"
)

func TestModuleList(t *testing.T) {
	got := parseModules("/lib/modules/a.ko\n\n# comment\n /lib/modules/b.ko \n/lib/modules/c.ko")
	if want := []string{"/lib/modules/a.ko", "/lib/modules/b.ko", "/lib/modules/c.ko"}; !slices.Equal(got, want) {
		t.Errorf("parseModules: got %q, want %q", got, want)
	}
	if got := parseModules(""); len(got) != 0 {
		t.Errorf("parseModules of an empty list: got %q", got)
	}
}

// TestFindDisk: the disk is the one with the whole serial number. Other kinds of disks have none.
func TestFindDisk(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "sr0"), 0o755); err != nil {
		t.Fatal(err)
	}
	for disk, serial := range map[string]string{"vda": "scratch0", "vdb": "guest01", "vdc": "guest0\n"} {
		if err := os.Mkdir(filepath.Join(dir, disk), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, disk, "serial"), []byte(serial), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := findDisk(dir, RootDisk); err != nil || got != "/dev/vdc" {
		t.Errorf("findDisk: got %q, %v, want /dev/vdc", got, err)
	}
	if _, err := findDisk(dir, "guest"); err == nil || !strings.Contains(err.Error(), "serial number guest") {
		t.Errorf("findDisk without such a disk: got %v", err)
	}
}

// TestMountsDoNotHideEachOther: a mount comes after those of its parent directories.
func TestMountsDoNotHideEachOther(t *testing.T) {
	for i, m := range mounts {
		for _, later := range mounts[i+1:] {
			if later.target == m.target || strings.HasPrefix(m.target, later.target+"/") {
				t.Errorf("the mount of %s hides %s", later.target, m.target)
			}
		}
	}
}

func TestMounts(t *testing.T) {
	for target, want := range map[string]string{
		"/proc": "proc", "/sys": "sysfs", "/sys/fs/cgroup": "cgroup2", "/dev": "devtmpfs", "/dev/pts": "devpts", "/dev/shm": "tmpfs",
		"/dev/mqueue": "mqueue", "/run": "tmpfs", "/tmp": "tmpfs",
	} {
		i := slices.IndexFunc(mounts, func(m mount) bool { return m.target == target })
		if i < 0 || mounts[i].fstype != want {
			t.Errorf("%s is not mounted as %s", target, want)
		} else if mounts[i].flags&unix.MS_NOSUID == 0 {
			t.Errorf("%s is not mounted with nosuid", target)
		}
	}
}

func TestControllers(t *testing.T) {
	root := t.TempDir()
	have, enabled := filepath.Join(root, "cgroup.controllers"), filepath.Join(root, "cgroup.subtree_control")
	if err := os.WriteFile(have, []byte("cpuset cpu io memory hugetlb pids rdma misc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(enabled, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := enableControllers(root); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(enabled)
	if want := "+cpuset +cpu +io +memory +hugetlb +pids"; err != nil || string(got) != want {
		t.Errorf("enabled controllers: got %q (%v), want %q", got, err, want)
	}
}

func TestPauses(t *testing.T) {
	pause, got := time.Duration(0), []time.Duration{}
	for range 8 {
		pause = nextPause(pause, time.Millisecond)
		got = append(got, pause/time.Millisecond)
	}
	if want := []time.Duration{100, 200, 400, 800, 1600, 3200, 5000, 5000}; !slices.Equal(got, want) {
		t.Errorf("pauses in ms: got %d, want %d", got, want)
	}
	if got := nextPause(lastPause, time.Minute); got != firstPause {
		t.Errorf("pause after a long run: got %s, want %s", got, firstPause)
	}
}

// TestReap: only the program's status is returned, and the other processes are reaped, too.
func TestReap(t *testing.T) {
	other, program := exec.Command("true"), exec.Command("sh", "-c", "exit 3")
	for _, c := range []*exec.Cmd{other, program} {
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		defer c.Process.Release()
	}
	var status unix.WaitStatus
	until.Holds(t, "the processes are reaped", func() bool {
		if s, ended := reap(program.Process.Pid); ended {
			status = s
		}
		return unix.Kill(other.Process.Pid, 0) == unix.ESRCH && unix.Kill(program.Process.Pid, 0) == unix.ESRCH
	})
	if got, want := describe(status), "exited with code 3"; got != want {
		t.Errorf("status: got %q, want %q", got, want)
	}
	if got, want := describe(unix.WaitStatus(unix.SIGKILL)), "was killed by signal 9"; got != want {
		t.Errorf("status of a killed process: got %q, want %q", got, want)
	}
}

// TestModulesOf: modules are found by the whole of a name, in which - and _ are equal.
func TestModulesOf(t *testing.T) {
	const list = "crypto_aes /a.ko\ncrypto_aes /b.ko\nip_tables /x.ko /ip.ko\nnothing\n"
	for name, want := range map[string][][]string{
		"ip_tables": {{"/x.ko", "/ip.ko"}}, "ip-tables": {{"/x.ko", "/ip.ko"}}, "crypto-aes": {{"/a.ko"}, {"/b.ko"}},
		"ip": nil, "nothing": nil, "": nil, "/x.ko": nil,
	} {
		if got := modulesOf(list, name); !slices.EqualFunc(got, want, slices.Equal[[]string]) {
			t.Errorf("modulesOf %q: got %q, want %q", name, got, want)
		}
	}
}
