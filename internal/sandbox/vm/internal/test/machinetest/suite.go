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

// Run runs all tests of the suite.
func Run(t *testing.T, s Subject) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, s Subject)
	}{
		{"Lifecycle", lifecycle}, {"Unknown", unknown}, {"Causes", causes}, {"Hung", hung}, {"OutOfMemory", outOfMemory},
		{"NoStart", noStart}, {"Reboot", reboot}, {"Devices", devices}, {"Balloon", balloon}, {"Hotplug", hotplug}, {"Shares", shares},
		{"LostShare", lostShare},
		{"BootsFromDisk", bootsFromDisk}, {"NoBoot", noBoot}, {"BootsByUEFI", bootsByUEFI}, {"VariablesOnDevice", variablesOnDevice},
		{"NoBootByUEFI", noBootByUEFI}, {"BootsFromCD", bootsFromCD}, {"Network", network}, {"DriverRestart", driverRestart},
		{"NodeRestart", nodeRestart},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, s) })
	}
}

// lifecycle checks every call, including calls that have no effect, and starts the same machine a second time.
func lifecycle(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	l.mustDefine(t, d)
	l.mustDefine(t, d)
	if got := l.MustState(d.Name); got.Phase != machine.Defined {
		t.Errorf("state after Define = %+v, want phase defined", got)
	}
	if err := l.Shutdown(t.Context(), d.Name); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Shutdown of a stopped machine: got error %v, want ErrFailedPrecondition", err)
	}
	if err := l.Destroy(t.Context(), d.Name); err != nil {
		t.Errorf("Destroy of a stopped machine: %v", err)
	}
	l.Boot(t, d)
	first := l.MustState(d.Name)
	if first.Phase != machine.Running || first.Pid <= 0 || first.StartedAt.IsZero() {
		t.Errorf("state of a running machine = %+v, want phase running, a PID and a start time", first)
	}
	if err := l.Start(t.Context(), d.Name); err != nil || l.MustState(d.Name).Pid != first.Pid {
		t.Errorf("Start of a running machine failed or changed its PID: %v", err)
	}
	other := d
	other.CPUs = 2
	if err := l.Define(t.Context(), other); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Define with changes for a running machine: got error %v, want ErrFailedPrecondition", err)
	}
	for range 2 {
		if err := l.Shutdown(t.Context(), d.Name); err != nil && !errdefs.IsUnavailable(err) {
			t.Errorf("shut down: %v", err)
		}
	}
	end := l.End(d.Name)
	if end.Cause != machine.CausePowerOff || end.ExitCode != 0 || end.FinishedAt.Before(first.StartedAt) || end.StartedAt.IsZero() {
		t.Errorf("end after Shutdown = %+v, want a power-off with code 0 and both times", end)
	}
	checkEnded(t, first.Pid)
	for what, call := range map[string]func(context.Context, string) error{"shut down": l.Shutdown, "destroy": l.Destroy} {
		if err := call(t.Context(), d.Name); err != nil {
			t.Errorf("%s an ended machine: %v", what, err)
		}
	}
	l.mustDefine(t, other) // allowed, because the machine is not running
	if err := l.Start(t.Context(), d.Name); err != nil {
		t.Fatalf("start again: %v", err)
	}
	AwaitLog(t, d, ready, 2)
	second := l.MustState(d.Name)
	if err := l.Destroy(t.Context(), d.Name); err != nil {
		t.Fatalf("destroy: %v", err)
	}
	checkEnded(t, second.Pid)
	if end := l.End(d.Name); end.Cause != machine.CauseKilled || end.ExitCode != 137 {
		t.Errorf("end after Destroy = %+v, want killed with code 137", end)
	}
	if n := len(l.Events()); n != 0 {
		t.Errorf("got %d more events, want none", n)
	}
	for range 2 {
		if err := l.Undefine(t.Context(), d.Name); err != nil {
			t.Errorf("undefine: %v", err)
		}
	}
	if _, err := l.State(t.Context(), d.Name); !errdefs.IsNotFound(err) {
		t.Errorf("State of an undefined machine: got error %v, want ErrNotFound", err)
	}
}

// unknown checks that every call for an undefined machine fails, except Undefine, and that every driver refuses certain
// definitions.
func unknown(t *testing.T, s Subject) {
	l := s.Begin(t, strings.Repeat("a", 64))
	defer l.Close()
	if len(l.Found) != 0 {
		t.Errorf("Recover of an unknown machine returned %v, want nothing", l.Found)
	}
	name := strings.Repeat("b", 64)
	for what, err := range map[string]error{
		"start": l.Start(t.Context(), name), "shutdown": l.Shutdown(t.Context(), name), "destroy": l.Destroy(t.Context(), name),
		"state": errOf(l.State(t.Context(), name)), "stats": errOf(l.Stats(t.Context(), name)), "firmware": errOf(l.Firmware(t.Context(), name)),
	} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("%s of an unknown machine: got error %v, want ErrNotFound", what, err)
		}
	}
	if err := l.Undefine(t.Context(), name); err != nil {
		t.Errorf("undefine: %v", err)
	}
	for what, change := range map[string]func(d *machine.Definition){
		"name":    func(d *machine.Definition) { d.Name = "../x" },
		"user":    func(d *machine.Definition) { d.UID = 0 },
		"memory":  func(d *machine.Definition) { d.Memory = 0 },
		"disk ID": func(d *machine.Definition) { d.Disks[0].ID = "a,readonly=off" },
		"format":  func(d *machine.Definition) { d.Disks[0].Format = "" },
		"MAC":     func(d *machine.Definition) { d.NICs = []machine.NIC{{MAC: "52:54"}} },
		"tag":     func(d *machine.Definition) { d.Shares = []machine.Share{{Tag: "a,b", Path: "/tmp"}} },
	} {
		d := s.Definition(t)
		change(&d)
		if err := l.Define(t.Context(), d); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Define with a wrong %s: got error %v, want ErrInvalidArgument", what, err)
		}
	}
}

// causes checks that the driver reports the right cause of a machine's end (fault V1).
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
			signal(t, l.MustState(d.Name).Pid, unix.SIGKILL)
		}, machine.CauseFailed, machine.ExitKilled},
		{"IgnoresACPI", func(t *testing.T, l *Life, d machine.Definition, c *Console) {
			c.Type(": >/run/ignore-power-button; echo will-$((40+2))-ignore")
			AwaitLog(t, d, "will-42-ignore", 1)
			must(t, l.Shutdown(t.Context(), d.Name))
			AwaitLog(t, d, "TRIPOD-GUEST-IGNORES-POWER-BUTTON", 1)
			if got := l.MustState(d.Name); got.Phase != machine.Running {
				t.Errorf("state of a guest that ignores the power button = %+v, want phase running", got)
			}
			must(t, l.Destroy(t.Context(), d.Name))
		}, machine.CauseKilled, machine.ExitKilled},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := s.Definition(t)
			console := l.Boot(t, d)
			pid := l.MustState(d.Name).Pid
			c.end(t, l, d, console)
			if end := l.End(d.Name); end.Cause != c.cause || end.ExitCode != c.code || end.Message == "" {
				t.Errorf("end = %+v, want cause %s, code %d and a message", end, c.cause, c.code)
			}
			checkEnded(t, pid)
			must(t, l.Undefine(t.Context(), d.Name))
		})
	}
}

// hung checks that a stopped hypervisor (fault V1) blocks no call and can be killed.
func hung(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	l.Boot(t, d)
	pid := l.MustState(d.Name).Pid
	signal(t, pid, unix.SIGSTOP)
	inTime := func(what string, call func() error) {
		t.Helper()
		begun := time.Now()
		err := call()
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("%s took %s with a stopped hypervisor, want at most 10 s (error %v)", what, took, err)
		}
	}
	inTime("state", func() error { return errOf(l.State(t.Context(), d.Name)) })
	inTime("stats", func() error { return errOf(l.Stats(t.Context(), d.Name)) })
	inTime("shutdown", func() error { return l.Shutdown(t.Context(), d.Name) })
	inTime("close", l.Close)
	inTime("recover", func() error { l = s.Begin(t, d.Name); return nil })
	defer l.Close()
	if got := l.Found[d.Name]; got.Phase != machine.Running || got.Pid != pid {
		t.Errorf("Recover found %+v, want running with PID %d", got, pid)
	}
	inTime("stats", func() error { return errOf(l.Stats(t.Context(), d.Name)) })
	signal(t, pid, unix.SIGCONT)
	Await(t, "the monitor answers again", func() bool { return errOf(l.Stats(t.Context(), d.Name)) == nil })
	signal(t, pid, unix.SIGSTOP)
	if err := l.Destroy(t.Context(), d.Name); err != nil {
		t.Fatalf("destroy: %v", err)
	}
	if end := l.End(d.Name); end.Cause != machine.CauseKilled || end.ExitCode != machine.ExitKilled {
		t.Errorf("end after Destroy = %+v, want killed with code 137", end)
	}
	checkEnded(t, pid)
	must(t, l.Undefine(t.Context(), d.Name))
}

// outOfMemory checks that the kernel kills a hypervisor that exceeds the limit of its cgroup, or the limit of the
// parent cgroup. A kubelet creates such a parent for each pod.
func outOfMemory(t *testing.T, s Subject) {
	const limit = 230 << 20
	t.Run("its cgroup", func(t *testing.T) { checkOOMKill(t, s, s.NewCgroup(t, randomName(t), limit), false) })
	t.Run("shared memory", func(t *testing.T) { checkOOMKill(t, s, s.NewCgroup(t, randomName(t), limit), true) })
	t.Run("parent cgroup", func(t *testing.T) {
		parent := randomName(t)
		s.NewCgroup(t, parent, limit)
		checkOOMKill(t, s, s.NewCgroup(t, parent+"/"+cgroup.Mark+"machine", 0), false)
	})
}

// checkOOMKill checks that the guest's memory is charged to the given cgroup and its parents, even if the memory is
// shared with virtiofsd.
func checkOOMKill(t *testing.T, s Subject, dir string, shared bool) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	d.Memory, d.Cgroup = 256<<20, dir
	if shared {
		AddShare(t, &d)
	}
	console := l.Boot(t, d)
	console.Type("mount -t tmpfs -o size=250m x /mnt; dd if=/dev/zero of=/mnt/x bs=1M count=200")
	if end := l.End(d.Name); end.Cause != machine.CauseOOM || end.ExitCode != machine.ExitKilled {
		t.Errorf("end = %+v, want cause oom with code 137", end)
	}
	must(t, l.Undefine(t.Context(), d.Name))
}

// noStart checks that Start says why a machine cannot start. The machine must then be Ended, and it must start once its
// definition is repaired.
func noStart(t *testing.T, s Subject) {
	l := s.Begin(t)
	defer l.Close()
	for _, c := range []struct {
		name   string
		damage func(d *machine.Definition)
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
			c.damage(&d)
			l.mustDefine(t, d)
			err := l.Start(t.Context(), d.Name)
			if !errdefs.IsFailedPrecondition(err) && !errdefs.IsUnavailable(err) && !errdefs.IsNotFound(err) ||
				!strings.Contains(err.Error(), c.reason) {
				t.Errorf("Start: got error %v, want one with a class that names %q", err, c.reason)
			}
			if got := l.MustState(d.Name); got.Phase != machine.Ended || got.Cause != machine.CauseStart || got.ExitCode == 0 || got.Message == "" {
				t.Errorf("state after Start = %+v, want ended with cause start, a code and a message", got)
			}
			if c.name == "NoQcow2" {
				l.mustDefine(t, good)
				if err := l.Start(t.Context(), d.Name); err != nil {
					t.Errorf("Start with the repaired definition: %v", err)
				}
			}
			must(t, l.Undefine(t.Context(), d.Name))
		})
	}
}

// reboot checks that after a guest's reboot, the machine still runs in the same process.
func reboot(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	console := l.Boot(t, d)
	before := l.MustState(d.Name)
	console.Type("reboot -f")
	AwaitLog(t, d, ready, 2)
	if after := l.MustState(d.Name); after != before || len(l.Events()) != 0 {
		t.Errorf("state after the reboot = %+v, want %+v and no events; got events %v", after, before, l.Events())
	}
	must(t, l.Undefine(t.Context(), d.Name)) // while the machine runs
	checkEnded(t, before.Pid)
}

func signal(t testing.TB, pid int, sig unix.Signal) {
	t.Helper()
	if err := unix.Kill(pid, sig); err != nil {
		t.Fatalf("signal %d to %d: %v", sig, pid, err)
	}
}

// checkEnded fails the test if the process is still running.
func checkEnded(t testing.TB, pid int) {
	t.Helper()
	p, err := process.Open(pid)
	if err != nil {
		return
	}
	defer p.Close()
	if p.Alive() {
		cmdline, _ := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "cmdline"))
		t.Errorf("process %d is still running: %.200q", pid, cmdline)
	}
}

// Await waits at most Patience for the condition to return true.
func Await(t testing.TB, what string, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(Patience); !condition(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within %s: %s", Patience, what)
		}
	}
}

func errOf[T any](_ T, err error) error { return err }

// must fails the test on error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
