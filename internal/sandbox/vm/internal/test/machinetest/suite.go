package machinetest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Run runs the suite.
func Run(t *testing.T, s Subject) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, s Subject)
	}{
		{"Lifecycle", lifecycle}, {"Unknown", unknown}, {"Causes", causes}, {"Hung", hung}, {"OutOfMemory", outOfMemory},
		{"NoStart", noStart}, {"Reboot", reboot}, {"Devices", devices}, {"Shares", shares}, {"LostShare", lostShare}, {"BootsFromDisk", bootsFromDisk}, {"NoBoot", noBoot}, {"Network", networked}, {"DriverRestart", driverRestart}, {"NodeRestart", nodeRestart},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, s) })
	}
}

// lifecycle: every call, each also where it has nothing to do any more, and a second life of the same machine.
func lifecycle(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	l.defined(t, d)
	l.defined(t, d)
	if got := l.Must(d.Name); got.Phase != machine.Defined {
		t.Errorf("defined: %+v", got)
	}
	if err := l.Shutdown(t.Context(), d.Name); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("shut down what does not run: %v", err)
	}
	if err := l.Destroy(t.Context(), d.Name); err != nil {
		t.Errorf("destroy what does not run: %v", err)
	}
	l.Up(t, d)
	first := l.Must(d.Name)
	if first.Phase != machine.Running || first.Pid <= 0 || first.StartedAt.IsZero() {
		t.Errorf("running: %+v", first)
	}
	if err := l.Start(t.Context(), d.Name); err != nil || l.Must(d.Name).Pid != first.Pid {
		t.Errorf("start what runs: %v", err)
	}
	other := d
	other.CPUs = 2
	if err := l.Define(t.Context(), other); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("another definition of what runs: %v", err)
	}
	for range 2 {
		if err := l.Shutdown(t.Context(), d.Name); err != nil && !errdefs.IsUnavailable(err) {
			t.Errorf("shut down: %v", err)
		}
	}
	end := l.End(d.Name)
	if end.Cause != machine.CausePowerOff || end.ExitCode != 0 || end.FinishedAt.Before(first.StartedAt) || end.StartedAt.IsZero() {
		t.Errorf("after the power button: %+v", end)
	}
	gone(t, first.Pid)
	for what, call := range map[string]func(context.Context, string) error{"shut down": l.Shutdown, "destroy": l.Destroy} {
		if err := call(t.Context(), d.Name); err != nil {
			t.Errorf("%s what has ended: %v", what, err)
		}
	}
	l.defined(t, other) // a machine that does not run may change
	if err := l.Start(t.Context(), d.Name); err != nil {
		t.Fatalf("start again: %v", err)
	}
	AwaitLog(t, d, ready, 2)
	second := l.Must(d.Name)
	if err := l.Destroy(t.Context(), d.Name); err != nil {
		t.Fatalf("destroy: %v", err)
	}
	gone(t, second.Pid)
	if end := l.End(d.Name); end.Cause != machine.CauseKilled || end.ExitCode != 137 {
		t.Errorf("destroyed: %+v", end)
	}
	if n := len(l.Events()); n != 0 {
		t.Errorf("%d more ends were reported", n)
	}
	for range 2 {
		if err := l.Undefine(t.Context(), d.Name); err != nil {
			t.Errorf("undefine: %v", err)
		}
	}
	if _, err := l.State(t.Context(), d.Name); !errdefs.IsNotFound(err) {
		t.Errorf("the state of what was undefined: %v", err)
	}
}

// unknown: calls for a machine that nobody has defined, and definitions that no driver takes.
func unknown(t *testing.T, s Subject) {
	l := s.Begin(t, strings.Repeat("a", 64))
	defer l.Close()
	if len(l.Found) != 0 {
		t.Errorf("found what never was: %v", l.Found)
	}
	name := strings.Repeat("b", 64)
	for what, err := range map[string]error{
		"start": l.Start(t.Context(), name), "shutdown": l.Shutdown(t.Context(), name), "destroy": l.Destroy(t.Context(), name),
		"state": second(l.State(t.Context(), name)), "stats": second(l.Stats(t.Context(), name)), "firmware": second(l.Firmware(t.Context(), name)),
	} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := l.Undefine(t.Context(), name); err != nil {
		t.Errorf("undefine: %v", err)
	}
	for what, change := range map[string]func(d *machine.Definition){
		"name":      func(d *machine.Definition) { d.Name = "../x" },
		"root":      func(d *machine.Definition) { d.UID = 0 },
		"no memory": func(d *machine.Definition) { d.Memory = 0 },
		"disk ID":   func(d *machine.Definition) { d.Disks[0].ID = "a,readonly=off" },
		"format":    func(d *machine.Definition) { d.Disks[0].Format = "" },
		"MAC":       func(d *machine.Definition) { d.NICs = []machine.NIC{{MAC: "52:54"}} },
		"tag":       func(d *machine.Definition) { d.Shares = []machine.Share{{Tag: "a,b", Path: "/tmp"}} },
	} {
		d := s.Definition(t)
		change(&d)
		if err := l.Define(t.Context(), d); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// causes: the ways in which a machine ends are distinguished (faults V1).
func causes(t *testing.T, s Subject) {
	l := s.Begin(t)
	defer l.Close()
	for _, c := range []struct {
		name  string
		end   func(t *testing.T, l *Life, d machine.Definition, c *Console)
		cause machine.Cause
		code  int32
	}{
		{"PowerOff", func(_ *testing.T, _ *Life, _ machine.Definition, c *Console) { c.Type("poweroff -f") }, machine.CausePowerOff, 0},
		{"Panic", func(_ *testing.T, _ *Life, _ machine.Definition, c *Console) { c.Type("echo c >/proc/sysrq-trigger") },
			machine.CausePanic, machine.ExitPanic},
		{"KilledBySomebody", func(t *testing.T, l *Life, d machine.Definition, _ *Console) {
			signal(t, l.Must(d.Name).Pid, unix.SIGKILL)
		}, machine.CauseFailed, machine.ExitKilled},
		{"IgnoresACPI", func(t *testing.T, l *Life, d machine.Definition, c *Console) {
			c.Type(": >/run/ignore-power-button; echo will-$((40+2))-ignore")
			AwaitLog(t, d, "will-42-ignore", 1)
			if err := l.Shutdown(t.Context(), d.Name); err != nil {
				t.Fatal(err)
			}
			AwaitLog(t, d, "TRIPOD-GUEST-IGNORES-POWER-BUTTON", 1)
			if got := l.Must(d.Name); got.Phase != machine.Running {
				t.Errorf("%+v", got)
			}
			if err := l.Destroy(t.Context(), d.Name); err != nil {
				t.Fatal(err)
			}
		}, machine.CauseKilled, machine.ExitKilled},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := s.Definition(t)
			console := l.Up(t, d)
			pid := l.Must(d.Name).Pid
			c.end(t, l, d, console)
			if end := l.End(d.Name); end.Cause != c.cause || end.ExitCode != c.code || end.Message == "" {
				t.Errorf("ended: %+v", end)
			}
			gone(t, pid)
			if err := l.Undefine(t.Context(), d.Name); err != nil {
				t.Error(err)
			}
		})
	}
}

// hung: a hypervisor that does not run (faults V1) holds nobody up, and can be ended.
func hung(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	l.Up(t, d)
	pid := l.Must(d.Name).Pid
	signal(t, pid, unix.SIGSTOP)
	inTime := func(what string, call func() error) {
		t.Helper()
		begun := time.Now()
		err := call()
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("%s took %s with a hypervisor that is stopped (%v)", what, took, err)
		}
	}
	inTime("state", func() error { return second(l.State(t.Context(), d.Name)) })
	inTime("stats", func() error { return second(l.Stats(t.Context(), d.Name)) })
	inTime("shutdown", func() error { return l.Shutdown(t.Context(), d.Name) })
	inTime("close", l.Close)
	inTime("a new life", func() error { l = s.Begin(t, d.Name); return nil })
	defer l.Close()
	if got := l.Found[d.Name]; got.Phase != machine.Running || got.Pid != pid {
		t.Errorf("found as %+v", got)
	}
	inTime("stats", func() error { return second(l.Stats(t.Context(), d.Name)) })
	signal(t, pid, unix.SIGCONT)
	Await(t, "the monitor answers again", func() bool { return second(l.Stats(t.Context(), d.Name)) == nil })
	signal(t, pid, unix.SIGSTOP)
	if err := l.Destroy(t.Context(), d.Name); err != nil {
		t.Fatalf("destroy: %v", err)
	}
	if end := l.End(d.Name); end.Cause != machine.CauseKilled || end.ExitCode != machine.ExitKilled {
		t.Errorf("ended: %+v", end)
	}
	gone(t, pid)
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
}

// outOfMemory: the kernel kills a hypervisor that takes more than its cgroup may have, by that one's limit or by the limit of
// the cgroup above, which is a kubelet's.
func outOfMemory(t *testing.T, s Subject) {
	const limit = 230 << 20
	t.Run("its cgroup", func(t *testing.T) { killedByLimit(t, s, s.NewCgroup(t, randomName(t), limit), false) })
	t.Run("its memory shared", func(t *testing.T) { killedByLimit(t, s, s.NewCgroup(t, randomName(t), limit), true) })
	t.Run("the one above", func(t *testing.T) {
		above := randomName(t)
		s.NewCgroup(t, above, limit)
		killedByLimit(t, s, s.NewCgroup(t, above+"/"+cgroup.Mark+"machine", 0), false)
	})
}

// killedByLimit: the guest's memory is charged to its cgroup, also when virtiofsd has it, too.
func killedByLimit(t *testing.T, s Subject, dir string, shared bool) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	d.Memory, d.Cgroup = 256<<20, dir
	if shared {
		AddShare(t, &d)
	}
	console := l.Up(t, d)
	console.Type("mount -t tmpfs -o size=250m x /mnt; dd if=/dev/zero of=/mnt/x bs=1M count=200")
	if end := l.End(d.Name); end.Cause != machine.CauseOOM || end.ExitCode != machine.ExitKilled {
		t.Errorf("ended: %+v", end)
	}
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
}

// noStart: what cannot be started says why, is Ended, and can be started once the reason is gone.
func noStart(t *testing.T, s Subject) {
	l := s.Begin(t)
	defer l.Close()
	for _, c := range []struct {
		name   string
		spoil  func(d *machine.Definition)
		reason string
	}{
		{"NoKernel", func(d *machine.Definition) { d.Kernel = &machine.File{Path: d.StateDir + "/none"} }, "none"},
		{"NoQcow2", func(d *machine.Definition) { d.Disks[0].File = d.Disks[0].Base.File }, "qcow2"},
		{"NoCPU", func(d *machine.Definition) { d.CPUModel = "Commodore64" }, "Commodore64"},
		{"NoCgroup", func(d *machine.Definition) { d.Cgroup += "/none" }, "cgroup"},
		{"NoShare", func(d *machine.Definition) {
			d.Shares = []machine.Share{{Tag: "x", Driver: machine.Share9p, Path: d.StateDir + "/none"}}
		}, "none"},
	} {
		t.Run(c.name, func(t *testing.T) {
			good := s.Definition(t)
			d := good
			d.Disks = append([]machine.Disk(nil), good.Disks...)
			c.spoil(&d)
			l.defined(t, d)
			err := l.Start(t.Context(), d.Name)
			if !errdefs.IsFailedPrecondition(err) && !errdefs.IsUnavailable(err) && !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), c.reason) {
				t.Errorf("start: %v", err)
			}
			if got := l.Must(d.Name); got.Phase != machine.Ended || got.Cause != machine.CauseStart || got.ExitCode == 0 || got.Message == "" {
				t.Errorf("state: %+v", got)
			}
			if c.name == "NoQcow2" {
				l.defined(t, good)
				if err := l.Start(t.Context(), d.Name); err != nil {
					t.Errorf("start, mended: %v", err)
				}
			}
			if err := l.Undefine(t.Context(), d.Name); err != nil {
				t.Error(err)
			}
		})
	}
}

// reboot: a guest that restarts itself goes on in the same process.
func reboot(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	console := l.Up(t, d)
	before := l.Must(d.Name)
	console.Type("reboot -f")
	AwaitLog(t, d, ready, 2)
	if after := l.Must(d.Name); after != before || len(l.Events()) != 0 {
		t.Errorf("before the reboot %+v, after it %+v, events %v", before, after, l.Events())
	}
	if err := l.Undefine(t.Context(), d.Name); err != nil { // of one that runs
		t.Error(err)
	}
	gone(t, before.Pid)
}

func signal(t testing.TB, pid int, sig unix.Signal) {
	t.Helper()
	if err := unix.Kill(pid, sig); err != nil {
		t.Fatalf("signal %d to %d: %v", sig, pid, err)
	}
}

// gone checks that a process has ended.
func gone(t testing.TB, pid int) {
	t.Helper()
	p, err := process.Open(pid)
	if err != nil {
		return
	}
	defer p.Close()
	if p.Alive() {
		cmdline, _ := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "cmdline"))
		t.Errorf("process %d lives on: %.200q", pid, cmdline)
	}
}

// Await waits until is says so.
func Await(t testing.TB, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(Patience); !is(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: not in %s", what, Patience)
		}
	}
}

func second[T any](_ T, err error) error { return err }
