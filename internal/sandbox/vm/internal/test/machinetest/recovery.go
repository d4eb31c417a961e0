package machinetest

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// driverRestart checks that machines outlive the driver, and that the next driver learns what happened to them in
// between.
func driverRestart(t *testing.T, s Subject) {
	l := s.Begin(t)
	kinds := map[string]machine.Definition{}
	consoles := map[string]*Console{}
	names := []string{}
	for _, kind := range []string{"stays", "powers off", "panics", "is killed", "is not named"} {
		d := s.Definition(t)
		kinds[kind] = d
		consoles[kind] = l.Boot(t, d)
		if kind != "is not named" {
			names = append(names, d.Name)
		}
	}
	idle := s.Definition(t)
	l.mustDefine(t, idle)
	names = append(names, idle.Name)
	pids := map[string]int{}
	for kind, d := range kinds {
		pids[kind] = l.MustState(d.Name).Pid
	}
	must(t, l.Close())
	consoles["powers off"].Type("poweroff -f")
	consoles["panics"].Type("echo c >/proc/sysrq-trigger")
	signal(t, pids["is killed"], unix.SIGKILL)
	AwaitLog(t, kinds["powers off"], "Power down", 1)
	AwaitLog(t, kinds["panics"], "Kernel panic", 1)

	l = s.Begin(t, names...)
	defer func() { l.Close() }()
	Await(t, "the driver reports the ended machines as ended", func() bool {
		return l.MustState(kinds["powers off"].Name).Phase == machine.Ended && l.MustState(kinds["panics"].Name).Phase == machine.Ended
	})
	for kind, want := range map[string]machine.State{
		"stays":      {Phase: machine.Running, Pid: pids["stays"]},
		"powers off": {Phase: machine.Ended, Cause: machine.CausePowerOff},
		"panics":     {Phase: machine.Ended, Cause: machine.CausePanic, ExitCode: machine.ExitPanic},
		"is killed":  {Phase: machine.Ended, Cause: machine.CauseFailed, ExitCode: machine.ExitKilled},
	} {
		got := l.MustState(kinds[kind].Name)
		if got.Phase != want.Phase || got.Cause != want.Cause || got.ExitCode != want.ExitCode || want.Pid != 0 && got.Pid != want.Pid {
			t.Errorf("state of the machine that %s while the daemon was down = %+v, want %+v", kind, got, want)
		}
		if want.Phase == machine.Ended {
			checkEnded(t, pids[kind])
		}
	}
	if got := l.Found[idle.Name]; got.Phase != machine.Defined {
		t.Errorf("state of the machine that never started = %+v, want phase defined", got)
	}
	if _, there := l.Found[kinds["is not named"].Name]; there {
		t.Error("Recover returned a machine that was not named")
	}
	checkEnded(t, pids["is not named"])

	consoles["stays"].Close()
	stays := kinds["stays"]
	Attach(t, stays).Type("echo still-$((40+2))-here")
	AwaitLog(t, stays, "still-42-here", 1)
	must(t, l.Shutdown(t.Context(), stays.Name))
	if end := l.End(stays.Name); end.Cause != machine.CausePowerOff || end.ExitCode != 0 {
		t.Errorf("end after Shutdown by the second driver = %+v, want a power-off with code 0", end)
	}
	if err := l.Start(t.Context(), stays.Name); err != nil {
		t.Fatalf("start by the second driver: %v", err)
	}
	if err := l.Start(t.Context(), idle.Name); err != nil {
		t.Fatalf("start a machine that the first driver defined: %v", err)
	}
	for _, d := range kinds {
		must(t, l.Undefine(t.Context(), d.Name))
	}
	must(t, l.Undefine(t.Context(), idle.Name))
}

// nodeRestart checks that after a reboot of the node, a machine is still known and can be started. It simulates the
// reboot: the machine's process has ended and its directory on a tmpfs is gone.
func nodeRestart(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	l.Boot(t, d)
	pid := l.MustState(d.Name).Pid
	must(t, l.Close())
	proc, err := process.Open(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer proc.Close()
	signal(t, pid, unix.SIGKILL)
	if !proc.WaitFor(Patience) { // until all its threads have ended
		t.Fatal("the hypervisor still runs after SIGKILL")
	}
	must(t, os.RemoveAll(filepath.Dir(d.Dir)))
	l = s.Begin(t, d.Name)
	defer l.Close()
	if got := l.Found[d.Name]; got.Phase != machine.Ended || got.Cause != machine.CauseUnknown || got.ExitCode != machine.ExitKilled {
		t.Errorf("state after a restart of the node = %+v, want ended for an unknown cause", got)
	}
	if err := l.Start(t.Context(), d.Name); err != nil {
		t.Fatalf("start: %v", err)
	}
	AwaitLog(t, d, ready, 2)
	must(t, l.Undefine(t.Context(), d.Name))
}
