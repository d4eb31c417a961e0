package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// TestConfined: QEMU has no privileges, cannot gain any, and has only the descriptors that it was given.
func TestConfined(t *testing.T) {
	s := subject(t)
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	if err := os.Chmod(filepath.Dir(d.StateDir), 0o700); err != nil { // QEMU needs no access to any path
		t.Fatal(err)
	}
	secret := filepath.Join(d.StateDir, "initrd")
	raw, err := os.ReadFile(s.Guest.Initrd)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(secret, raw, 0o400); err != nil {
		t.Fatal(err)
	}
	d.Initrd = &machine.File{Path: secret}
	d.VNC = true
	l.Boot(t, d)
	pid := l.MustState(d.Name).Pid
	proc := func(name string) string {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	status := proc("status")
	for _, want := range []string{
		"Uid:\t200001\t200001\t200001\t200001\n", "Gid:\t200002\t200002\t200002\t200002\n", "Groups:\t \n", "NoNewPrivs:\t1\n", "Seccomp:\t2\n",
		"CapInh:\t0000000000000000\n", "CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n", "CapAmb:\t0000000000000000\n",
	} {
		if !strings.Contains(status, want) {
			t.Errorf("QEMU's status lacks %q: %s", want, status)
		}
	}
	for line := range strings.Lines(proc("cgroup")) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); parts[1] != "" && parts[2] != d.Cgroup {
			t.Errorf("QEMU is in cgroup %s, want %s", line, d.Cgroup)
		}
	}
	if devices := proc("net/dev"); strings.Count(devices, ":") != 1 {
		t.Errorf("QEMU sees network devices besides lo: %s", devices)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	ours, err := filepath.EvalSymlinks(filepath.Dir(d.StateDir))
	kernel, kernelErr := filepath.EvalSymlinks(s.Guest.Kernel)
	if err := errors.Join(err, kernelErr); err != nil {
		t.Fatal(err)
	}
	allowed := []string{"socket:", "anon_inode:", "/dev/null", "/memfd:", "pipe:", "/dev/urandom", kernel, ours, filepath.Dir(ours),
		"/dev/shm"}
	for _, fd := range fds {
		target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		if err != nil {
			continue
		}
		ok := false
		for _, prefix := range allowed {
			ok = ok || strings.HasPrefix(target, prefix)
		}
		if !ok {
			t.Errorf("QEMU has descriptor %s, %s, want none besides its own files", fd.Name(), target)
		}
	}
	vnc, err := unixsocket.Dial(t.Context(), filepath.Join(d.Dir, machine.VNCSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer vnc.Close()
	hello := make([]byte, 4)
	if _, err := vnc.Read(hello); err != nil || string(hello) != "RFB " {
		t.Errorf("read from VNC: got %q, %v; want \"RFB \"", hello, err)
	}
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(d.Dir); err == nil {
		t.Errorf("directory %s still exists", d.Dir)
	}
}

// TestShares: a guest's root has the intended access to shared directories, and no more.
func TestShares(t *testing.T) {
	s := subject(t)
	s.Guest = machinetest.FindGuest(t, true)
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	d.Memory = 256 << 20
	rw, ro, mapped := filepath.Join(d.StateDir, "rw"), filepath.Join(d.StateDir, "ro"), filepath.Join(d.StateDir, "mapped")
	for _, dir := range []string{rw, ro, mapped} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "secret"), []byte("for root only\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d.Shares = []machine.Share{{Tag: "tripod:0", Path: rw, Driver: machine.Share9p},
		{Tag: "tripod:1", Path: ro, Driver: machine.Share9p, ReadOnly: true}, {Tag: "tripod:2", Path: mapped, Driver: machine.Share9pMapped}}
	console := l.Boot(t, d)
	console.Type("for t in rw ro; do mkdir -p /$t; [ $t = rw ] && tag=tripod:0 || tag=tripod:1; mount -t 9p -o trans=virtio,version=9p2000.L $tag /$t; cat /$t/secret; echo new >/$t/new; done; " +
		"mkdir /rw/sub; chmod 750 /rw/sub; mv /rw/new /rw/sub/; sync; ls -ln /rw /ro; echo shares-$((40+2))")
	machinetest.AwaitLog(t, d, "shares-42", 1)
	machinetest.AwaitLog(t, d, "for root only", 2)
	console.Type("%s", machinetest.MapOwners("tripod:2"))
	info, err := os.Stat(filepath.Join(rw, "sub", "new"))
	if err != nil {
		t.Fatal(err)
	}
	if uid := owner(info); uid != 0 {
		t.Errorf("owner of a file that the guest's root created = %d, want 0", uid)
	}
	if info, err := os.Stat(filepath.Join(rw, "sub")); err != nil || info.Mode().Perm() != 0o750 {
		t.Errorf("Stat of the guest's directory = %v, %v; want mode 0750", info, err)
	}
	if _, err := os.Stat(filepath.Join(ro, "new")); err == nil {
		t.Error("the guest could write to a read-only share")
	}
	machinetest.CheckMapped(t, d, mapped)
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
}

// TestManyShares: a machine can have more shares than there are PCI slots, and the guest mounts the last.
func TestManyShares(t *testing.T) {
	s := subject(t)
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	const many = 40
	for i := range many {
		dir := filepath.Join(d.StateDir, fmt.Sprintf("share%d", i))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		d.Shares = append(d.Shares, machine.Share{Tag: fmt.Sprintf("share%d", i), Path: dir, Driver: machine.ShareVirtiofs})
	}
	console := l.Boot(t, d)
	machinetest.AwaitMachines(t, d, 1)
	console.Type("mkdir /last; mount -t virtiofs share%d /last && echo from the guest >/last/note; echo many-$((40+2))", many-1)
	machinetest.AwaitLog(t, d, "many-42", 1)
	if note, err := os.ReadFile(filepath.Join(d.Shares[many-1].Path, "note")); err != nil || string(note) != "from the guest\n" {
		t.Errorf("content of the last share = %q, %v; want the guest's line", note, err)
	}
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
}

// TestProbe: the boot sector boots, and the next driver reuses the stored verdict.
func TestProbe(t *testing.T) {
	root := filepath.Join(t.TempDir(), "qemu")
	cfg := Config{Root: root, UID: 200001, GID: 200001, Logger: logger(t)}
	first := verdictOf(t, cfg)
	t.Logf("%+v", first)
	info, err := os.Stat(filepath.Join(root, verdictFile))
	if err != nil {
		t.Fatal(err)
	}
	if again := verdictOf(t, cfg); again != first {
		t.Errorf("second verdict = %+v, want %+v", again, first)
	}
	if later, err := os.Stat(filepath.Join(root, verdictFile)); err != nil || !later.ModTime().Equal(info.ModTime()) {
		t.Error("the second driver wrote a new verdict, or Stat failed")
	}
	cfg.UID = 200002 // another user may have no access to /dev/kvm
	verdictOf(t, cfg)
	if later, err := os.Stat(filepath.Join(root, verdictFile)); err != nil || later.ModTime().Equal(info.ModTime()) {
		t.Error("the driver reused the verdict of another user")
	}
	for _, f := range Doctor(t.Context(), cfg) {
		t.Logf("%+v", f)
		if f.Required && !f.OK {
			t.Errorf("required finding %s is not OK: %s", f.Subject, f.Detail)
		}
	}
}

func verdictOf(t *testing.T, cfg Config) Verdict {
	t.Helper()
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	v, err := d.Probe(ctx)
	if err != nil || v.Accel != AccelKVM && v.Accel != AccelTCG || v.Why == "" {
		t.Fatalf("Probe = %+v, %v; want a known accelerator and a reason", v, err)
	}
	if v.Accel == AccelTCG { // at least TCG must work
		if err := d.cfg.bootProbe(ctx, AccelTCG); err != nil {
			t.Error(err)
		}
	}
	return v
}

func owner(info os.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }
