package machinetest

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// driverRestart: machines outlive the driver, and the next one knows what became of them while there was none.
func driverRestart(t *testing.T, s Subject) {
	l := s.Begin(t)
	kinds := map[string]machine.Definition{}
	consoles := map[string]*Console{}
	names := []string{}
	for _, kind := range []string{"stays", "powers off", "panics", "is killed", "is not named"} {
		d := s.Definition(t)
		kinds[kind] = d
		consoles[kind] = l.Up(t, d)
		if kind != "is not named" {
			names = append(names, d.Name)
		}
	}
	idle := s.Definition(t)
	l.defined(t, idle)
	names = append(names, idle.Name)
	pids := map[string]int{}
	for kind, d := range kinds {
		pids[kind] = l.Must(d.Name).Pid
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	consoles["powers off"].Type("poweroff -f")
	consoles["panics"].Type("echo c >/proc/sysrq-trigger")
	signal(t, pids["is killed"], unix.SIGKILL)
	AwaitLog(t, kinds["powers off"], "Power down", 1)
	AwaitLog(t, kinds["panics"], "Kernel panic", 1)

	l = s.Begin(t, names...)
	defer func() { l.Close() }()
	Await(t, "the machines that ended are known to have", func() bool {
		return l.Must(kinds["powers off"].Name).Phase == machine.Ended && l.Must(kinds["panics"].Name).Phase == machine.Ended
	})
	for kind, want := range map[string]machine.State{
		"stays":      {Phase: machine.Running, Pid: pids["stays"]},
		"powers off": {Phase: machine.Ended, Cause: machine.CausePowerOff},
		"panics":     {Phase: machine.Ended, Cause: machine.CausePanic, ExitCode: machine.ExitPanic},
		"is killed":  {Phase: machine.Ended, Cause: machine.CauseFailed, ExitCode: machine.ExitKilled},
	} {
		got := l.Must(kinds[kind].Name)
		if got.Phase != want.Phase || got.Cause != want.Cause || got.ExitCode != want.ExitCode || want.Pid != 0 && got.Pid != want.Pid {
			t.Errorf("one that %s while the daemon is away is %+v", kind, got)
		}
		if want.Phase == machine.Ended {
			gone(t, pids[kind])
		}
	}
	if got := l.Found[idle.Name]; got.Phase != machine.Defined {
		t.Errorf("one that was defined only: %+v", got)
	}
	if _, there := l.Found[kinds["is not named"].Name]; there {
		t.Error("a machine that was not named is in the answer")
	}
	gone(t, pids["is not named"])

	consoles["stays"].Close()
	stays := kinds["stays"]
	Attach(t, stays).Type("echo still-$((40+2))-here")
	AwaitLog(t, stays, "still-42-here", 1)
	if err := l.Shutdown(t.Context(), stays.Name); err != nil {
		t.Fatal(err)
	}
	if end := l.End(stays.Name); end.Cause != machine.CausePowerOff || end.ExitCode != 0 {
		t.Errorf("shut down by the second life: %+v", end)
	}
	if err := l.Start(t.Context(), stays.Name); err != nil {
		t.Fatalf("start in the second life: %v", err)
	}
	if err := l.Start(t.Context(), idle.Name); err != nil {
		t.Fatalf("start what was defined in the first life: %v", err)
	}
	for _, d := range kinds {
		if err := l.Undefine(t.Context(), d.Name); err != nil {
			t.Error(err)
		}
	}
	if err := l.Undefine(t.Context(), idle.Name); err != nil {
		t.Error(err)
	}
}

// nodeRestart: the processes are gone and so is what was on a tmpfs; the machine is known and can be started.
func nodeRestart(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	l.Up(t, d)
	pid := l.Must(d.Name).Pid
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	proc, err := process.Open(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer proc.Close()
	signal(t, pid, unix.SIGKILL)
	if !proc.WaitFor(Patience) { // its threads too
		t.Fatal("the hypervisor outlives SIGKILL")
	}
	if err := os.RemoveAll(filepath.Dir(d.Dir)); err != nil {
		t.Fatal(err)
	}
	l = s.Begin(t, d.Name)
	defer l.Close()
	if got := l.Found[d.Name]; got.Phase != machine.Ended || got.Cause != machine.CauseUnknown || got.ExitCode != machine.ExitKilled {
		t.Errorf("after a restart of the node: %+v", got)
	}
	if err := l.Start(t.Context(), d.Name); err != nil {
		t.Fatalf("start: %v", err)
	}
	AwaitLog(t, d, ready, 2)
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
}
