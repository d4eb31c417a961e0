package qemu

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// haltedMachine returns a machine whose boot sector only halts. It ignores the power button.
func haltedMachine(t *testing.T, s machinetest.Subject) machine.Definition {
	t.Helper()
	d := s.Definition(t)
	sector := make([]byte, 1<<20)
	copy(sector, []byte{0xfa, 0xf4, 0xeb, 0xfd}) // cli; hlt; jmp to hlt
	sector[510], sector[511] = 0x55, 0xaa
	path := filepath.Join(d.StateDir, "halts.img")
	if err := os.WriteFile(path, sector, 0o600); err != nil {
		t.Fatal(err)
	}
	d.Kernel, d.Initrd, d.Cmdline = nil, nil, ""
	d.Disks = []machine.Disk{{ID: "root", File: machine.File{Path: path}, Format: "raw", Bus: machine.BusVirtio}}
	return d
}

// start defines and starts a machine.
func start(t *testing.T, l *machinetest.Life, d machine.Definition) {
	t.Helper()
	if err := l.Define(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if err := l.Start(t.Context(), d.Name); err != nil {
		t.Fatal(err)
	}
}

// destroy destroys a machine and checks the event.
func destroy(t *testing.T, l *machinetest.Life, d machine.Definition) {
	t.Helper()
	if err := l.Destroy(t.Context(), d.Name); err != nil {
		t.Fatal(err)
	}
	if end := l.End(d.Name); end.Cause != machine.CauseKilled || end.ExitCode != machine.ExitKilled {
		t.Errorf("end after Destroy = %+v, want killed with code 137", end)
	}
	machinetest.AwaitMachines(t, d, 0)
}

// TestV1Paused: a machine that another client paused is running for this driver and the next, and can be destroyed.
func TestV1Paused(t *testing.T) {
	s := subject(t)
	l, d := s.Begin(t), haltedMachine(t, s)
	start(t, l, d)
	_, _, r := l.Driver.(*Driver).machines[d.Name].snapshot()
	if err := r.execute(t.Context(), "stop", nil); err != nil {
		t.Fatal(err)
	}
	if err := l.Shutdown(t.Context(), d.Name); err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	pid := l.MustState(d.Name).Pid
	l.Close()
	l = s.Begin(t, d.Name)
	defer func() { l.Close() }()
	if found := l.Found[d.Name]; found.Phase != machine.Running || found.Pid != pid || len(l.Events()) != 0 {
		t.Errorf("Recover found %+v with events %v, want running with PID %d and no events", found, l.Events(), pid)
	}
	destroy(t, l, d)
}

// TestV1MonitorSilent: another client holds a machine's monitor, which does not answer. The driver recovers the machine
// without blocking, gets answers once the other client has disconnected, and can destroy the machine at any time.
func TestV1MonitorSilent(t *testing.T) {
	s := subject(t)
	l, d := s.Begin(t), haltedMachine(t, s)
	start(t, l, d)
	l.Close()
	other, err := unixsocket.Dial(t.Context(), filepath.Join(d.Dir, monitorSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := other.Read(make([]byte, 1)); err != nil { // the monitor serves this client
		t.Fatal(err)
	}
	l = s.Begin(t, d.Name)
	defer func() { l.Close() }()
	if found := l.Found[d.Name]; found.Phase != machine.Running {
		t.Errorf("Recover found %+v, want phase running", found)
	}
	_, statsErr := l.Stats(t.Context(), d.Name)
	_, firmwareErr := l.Firmware(t.Context(), d.Name)
	for what, err := range map[string]error{"Shutdown": l.Shutdown(t.Context(), d.Name), "Stats": statsErr, "Firmware": firmwareErr} {
		if !errdefs.IsUnavailable(err) {
			t.Errorf("%s with a silent monitor: got error %v, want ErrUnavailable", what, err)
		}
	}
	other.Close()
	ctx, cancel := context.WithTimeout(t.Context(), machinetest.Patience)
	defer cancel()
	for _, err := l.Stats(ctx, d.Name); err != nil; _, err = l.Stats(ctx, d.Name) {
		if ctx.Err() != nil {
			t.Fatalf("the monitor does not answer after the other client disconnected: %v", err)
		}
	}
	destroy(t, l, d)
}

// TestV2NoKVM: without working KVM, vm.accel auto emulates and gives the reason; with kvm, Start fails and names KVM.
func TestV2NoKVM(t *testing.T) {
	nothing := filepath.Join(t.TempDir(), "kvm")
	if err := os.WriteFile(nothing, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/dev/kvm"); err == nil { // hide it; otherwise it is absent anyway
		if err := unix.Mount(nothing, "/dev/kvm", "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount("/dev/kvm", unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
	if v := verdictOf(t, Config{Root: filepath.Join(t.TempDir(), "auto"), UID: 200001, GID: 200001, Logger: logger(t)}); v.Accel != AccelTCG ||
		!strings.HasPrefix(v.Why, "KVM: ") {
		t.Errorf("verdict = %+v, want tcg with a reason that begins with \"KVM: \"", v)
	}
	s := subject(t)
	root := filepath.Join(t.TempDir(), "kvm-only")
	s.New = func(t testing.TB) machine.Driver {
		d, err := New(Config{Root: root, Accel: AccelKVM, Cgroup: machinetest.Cgroups(t), Logger: logger(t)})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	l, d := s.Begin(t), haltedMachine(t, s)
	defer l.Close()
	if err := l.Define(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	err := l.Start(t.Context(), d.Name)
	if !errdefs.IsFailedPrecondition(err) && !errdefs.IsUnavailable(err) || !strings.Contains(strings.ToLower(err.Error()), "kvm") {
		t.Errorf("Start without KVM: got error %v, want a class and a mention of KVM", err)
	}
	if got := l.MustState(d.Name); got.Phase != machine.Ended || got.Cause != machine.CauseStart {
		t.Errorf("state after Start = %+v, want ended with cause start", got)
	}
}
