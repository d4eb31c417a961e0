package machinetest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// shareMachine returns a machine with two virtio-fs shares, and the paths of their directories. The second share is
// read-only.
func shareMachine(t *testing.T, s Subject) (d machine.Definition, rw, ro string) {
	t.Helper()
	d = s.Definition(t)
	rw, ro = filepath.Join(d.StateDir, "rw"), filepath.Join(d.StateDir, "ro")
	for _, dir := range []string{rw, ro} {
		for path, mode := range map[string]os.FileMode{dir: 0o755, filepath.Join(dir, "theirs"): 0o700} {
			must(t, os.MkdirAll(path, mode))
		}
		writeFile(t, filepath.Join(dir, "secret"), "for root only\n", 0)
		writeFile(t, filepath.Join(dir, "theirs/file"), "for user 999 only\n", 999)
		must(t, os.Chown(filepath.Join(dir, "theirs"), 999, 999))
	}
	d.Shares = []machine.Share{
		{Tag: "rw", Path: rw, Driver: machine.ShareVirtiofs}, {Tag: "ro", Path: ro, Driver: machine.ShareVirtiofs, ReadOnly: true},
	}
	return d, rw, ro
}

func writeFile(t *testing.T, path, content string, owner int) {
	t.Helper()
	err := os.WriteFile(path, []byte(content), 0o600)
	if err == nil {
		err = os.Chown(path, owner, owner)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// mountShares is the guest's command that mounts both shares.
const mountShares = "for t in rw ro; do mkdir -p /$t; mount -t virtiofs $t /$t; done; "

// shares checks that the guest's changes in a virtio-fs share appear on the node with their owners and modes, that the
// node's changes appear in the guest, and that the guest cannot write to a read-only share. The shares must still work
// after a restart of the driver, a reboot of the guest and a restart of the machine.
func shares(t *testing.T, s Subject) {
	l := s.Begin(t)
	d, rw, ro := shareMachine(t, s)
	console := l.Boot(t, d)
	console.Type(mountShares + "cat /*/secret /*/theirs/file; cd /rw; echo new >new; chown 1000:1001 new; chmod 640 new; mkfifo pipe; " +
		"ln -s new link; ln new hard; echo over >tmp; mv tmp secret; mkdir -m 700 db; chown 999:999 db; " +
		"mkdir /tmp/m && echo one >a && echo two >b && mv b a && cat a; stat -c '%%u:%%g:%%a' new db theirs; " +
		"mknod null c 1 3; mount -o remount,rw /ro; echo no >/ro/new; rm /ro/secret; ls /rw/../..; cd /; echo shares-$((40+2))")
	AwaitLog(t, d, "shares-42", 1)
	for text, times := range map[string]int{"for root only": 2, "for user 999 only": 2, "\ntwo\r": 1, "1000:1001:640": 1,
		"\r\n999:999:700\r\n999:999:700": 1, "Operation not permitted": 1, "Read-only file system": 2} {
		AwaitLog(t, d, text, times)
	}
	for name, want := range map[string]string{"new": "1000:1001 -rw-r-----", "hard": "1000:1001 -rw-r-----", "pipe": "0:0 prw-r--r--",
		"db": "999:999 drwx------", "secret": "0:0 -rw-r--r--", "link": "0:0 Lrwxrwxrwx"} {
		info, err := os.Lstat(filepath.Join(rw, name))
		if err != nil {
			t.Error(err)
			continue
		}
		st := info.Sys().(*syscall.Stat_t)
		if got := fmt.Sprintf("%d:%d %s", st.Uid, st.Gid, info.Mode()); got != want {
			t.Errorf("%s on the node is %s, want %s", name, got, want)
		}
	}
	for _, name := range []string{filepath.Join(ro, "new"), filepath.Join(rw, "null")} {
		if _, err := os.Lstat(name); err == nil {
			t.Errorf("the guest could create %s", name)
		}
	}
	if _, err := os.Stat(filepath.Join(ro, "secret")); err != nil {
		t.Error(err)
	}

	before := virtiofsdPIDs(t, d)
	if len(before) != 2 {
		t.Errorf("virtiofsd runs as %v, want two processes", before)
	}
	checkConfined(t, s, before)
	must(t, l.Close())
	l = s.Begin(t, d.Name)
	defer func() { l.Close() }()
	writeFile(t, filepath.Join(rw, "note.new"), "from the node\n", 1000)
	must(t, os.Rename(filepath.Join(rw, "note.new"), filepath.Join(rw, "note")))
	console = Attach(t, d)
	console.Type("cat /rw/note; reboot -f")
	AwaitLog(t, d, "from the node", 1)
	AwaitLog(t, d, ready, 2)
	console.Type(mountShares + "cat /rw/note")
	AwaitLog(t, d, "from the node", 2)
	if after := virtiofsdPIDs(t, d); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("virtiofsd processes after the reboot = %v, want %v", after, before)
	}
	for range 2 { // each start may use new virtiofsd processes; these end with the machine
		must(t, l.Destroy(t.Context(), d.Name))
		if left := virtiofsdPIDs(t, d); len(left) != 0 {
			t.Errorf("virtiofsd processes left behind: %v", left)
		}
		must(t, l.Start(t.Context(), d.Name))
	}
	AwaitLog(t, d, ready, 3)
	Attach(t, d).Type(mountShares + "cat /rw/note")
	AwaitLog(t, d, "from the node", 3)
	must(t, l.Undefine(t.Context(), d.Name))
	if _, err := os.Stat(d.Dir); err == nil {
		t.Errorf("directory %s still exists", d.Dir)
	}
}

// lostShare checks that a machine ends with a message when one of its virtiofsd processes is killed, even while no
// driver runs. It also checks that a restart of the machine starts a new virtiofsd, and that Start reports a missing
// directory.
func lostShare(t *testing.T, s Subject) {
	l := s.Begin(t)
	defer func() { l.Close() }()
	d, _, ro := shareMachine(t, s)
	l.Boot(t, d)
	kill := func() {
		for _, pid := range virtiofsdPIDs(t, d)[1:] {
			signal(t, pid, unix.SIGKILL)
		}
	}
	kill()
	checkLostShare := func(end machine.State) {
		t.Helper()
		if end.Cause != machine.CauseFailed || end.ExitCode != machine.ExitKilled || !strings.Contains(end.Message, "virtiofsd of the share ro") {
			t.Errorf("ended: got %+v, want a failure that names virtiofsd of the share ro", end)
		}
		// State may show the machine's end before the other virtiofsd has ended. The event comes only afterwards.
		Await(t, "no virtiofsd of the machine is left", func() bool { return len(virtiofsdPIDs(t, d)) == 0 })
	}
	checkLostShare(l.End(d.Name))
	must(t, l.Start(t.Context(), d.Name))
	must(t, l.Close())
	kill()
	l = s.Begin(t, d.Name)
	Await(t, "the machine that lost a share while no driver ran has ended", func() bool { return l.MustState(d.Name).Phase == machine.Ended })
	checkLostShare(l.MustState(d.Name))
	must(t, os.Rename(ro, ro+".away"))
	if err := l.Start(t.Context(), d.Name); err == nil || !strings.Contains(err.Error(), ro) ||
		l.MustState(d.Name).Cause != machine.CauseStart {
		t.Errorf("Start without the share's directory: got error %v and state %+v, want an error that names it and cause start", err,
			l.MustState(d.Name))
	}
	if left := virtiofsdPIDs(t, d); len(left) != 0 {
		t.Errorf("virtiofsd processes left behind: %v", left)
	}
	must(t, l.Undefine(t.Context(), d.Name))
}

// MapOwners returns shell commands for the guest. The commands mount a 9p share with mapped owners twice and use it.
func MapOwners(tag string) string {
	mount := "mkdir -p /mapped && mount -t 9p -o trans=virtio,version=9p2000.L " + tag + " /mapped; "
	return mount + "mkdir -m 700 /mapped/db; echo kept >/mapped/db/file; chown -R 999:998 /mapped/db; mkfifo /mapped/pipe; ln -s db /mapped/link; umount /mapped; " +
		mount + "stat -c 'mapped %u:%g:%a:%F' /mapped/db /mapped/db/file /mapped/pipe; cat /mapped/link/file; echo mapped-$((40+2))"
}

// CheckMapped checks the results of MapOwners in the guest's output and in the share's directory.
func CheckMapped(t testing.TB, d machine.Definition, dir string) {
	t.Helper()
	for _, text := range []string{"mapped 999:998:700:directory", "mapped 999:998:644:regular file", "mapped 0:0:644:fifo", "\nkept\r",
		"mapped-42"} {
		AwaitLog(t, d, text, 1)
	}
	for _, name := range []string{"db", "db/file", "pipe", "link"} {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
			continue
		}
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != 0 || !info.IsDir() && !info.Mode().IsRegular() {
			t.Errorf("%s on the node has owner %d and mode %s, want a plain file or directory of root", name, uid, info.Mode())
		}
	}
}

// AddShare adds a virtio-fs share to a machine.
func AddShare(t testing.TB, d *machine.Definition) {
	t.Helper()
	dir := filepath.Join(d.StateDir, "shared")
	must(t, os.Mkdir(dir, 0o755))
	d.Shares = append(d.Shares, machine.Share{Tag: "shared", Path: dir, Driver: machine.ShareVirtiofs})
}

// AwaitMachines waits until the given number of machines run in d's cgroup. Their shares must all be virtio-fs. Each
// machine has one QEMU process and, for each share, two processes that end after QEMU.
func AwaitMachines(t testing.TB, d machine.Definition, machines int) {
	t.Helper()
	tree := Cgroups(t)
	Await(t, fmt.Sprintf("%d machines run in the cgroup", machines), func() bool {
		return len(cgroup.Procs(filepath.Join(tree.Roots[tree.Hierarchy("pids")], d.Cgroup))) == machines*(1+2*len(d.Shares))
	})
}

// virtiofsdPIDs returns the first process of each virtiofsd of a machine, in the order of their start.
func virtiofsdPIDs(t testing.TB, d machine.Definition) (pids []int) {
	t.Helper()
	tree := Cgroups(t)
	all := cgroup.Procs(filepath.Join(tree.Roots[tree.Hierarchy("pids")], d.Cgroup))
	for _, pid := range all {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		stat, statErr := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err == nil && statErr == nil && strings.TrimSpace(string(comm)) == virtiofsd.ProgramName &&
			strings.Count(statusField(string(stat), "NSpid"), "\t") == 1 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// statusField returns the value of a line of /proc/PID/status.
func statusField(status, name string) string {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, name+":\t"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// checkConfined checks the user, the capabilities and the namespaces of each virtiofsd process.
func checkConfined(t *testing.T, s Subject, pids []int) {
	t.Helper()
	for _, first := range pids {
		raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", first, first))
		for _, pid := range append([]string{fmt.Sprint(first)}, strings.Fields(string(raw))...) {
			proc := func(name string) string {
				raw, err := os.ReadFile("/proc/" + pid + "/" + name)
				if err != nil {
					t.Error(err)
				}
				return string(raw)
			}
			uid := fmt.Sprint(s.UID)
			status := proc("status")
			if got := statusField(status, "Uid"); got != strings.Join([]string{uid, uid, uid, uid}, "\t") {
				t.Errorf("process %s of virtiofsd runs as %s, want %s", pid, got, uid)
			}
			if statusField(status, "NoNewPrivs") != "1" {
				t.Errorf("process %s of virtiofsd may gain privileges", pid)
			}
			for fields := range strings.Lines(proc("uid_map")) {
				if f := strings.Fields(fields); f[1] == "0" {
					t.Errorf("virtiofsd can become the node's root: %s", fields)
				}
			}
			own, err := os.Readlink("/proc/" + pid + "/ns/user")
			ours, ourErr := os.Readlink("/proc/self/ns/user")
			if err != nil || ourErr != nil || own == ours {
				t.Errorf("user namespace of virtiofsd = %s (error %v), want another than the test's %s (error %v)", own, err, ours, ourErr)
			}
			if pid == fmt.Sprint(first) {
				continue // the first process only waits for the second and has no capability
			}
			if statusField(status, "Seccomp") != "2" {
				t.Error("virtiofsd has no seccomp filter")
			}
			const allowed = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID |
				1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID
			var have uint64
			if _, err := fmt.Sscanf(statusField(status, "CapPrm"), "%x", &have); err != nil || have&^uint64(allowed) != 0 {
				t.Errorf("capabilities of virtiofsd = %x (error %v), want at most %x", have, err, uint64(allowed))
			}
			names, err := os.ReadDir("/proc/" + pid + "/root/")
			if err != nil || !strings.Contains(fmt.Sprint(names), "secret") || strings.Contains(fmt.Sprint(names), "proc") {
				t.Errorf("root directory of virtiofsd = %v (error %v), want the share only", names, err)
			}
			for line := range strings.Lines(proc("net/dev")) {
				if strings.Contains(line, ":") && !strings.Contains(line, "lo:") {
					t.Errorf("virtiofsd has a network: %s", line)
				}
			}
		}
	}
}
