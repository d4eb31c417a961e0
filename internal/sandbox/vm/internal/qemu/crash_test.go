package qemu

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// victimEnv is the environment variable with the orders, as JSON, for a process that dies at a fail point.
const victimEnv = "TRIPOD_QEMU_VICTIM"

type victim struct {
	Root       string
	Virtiofsd  string
	Definition machine.Definition
	Cgroups    cgroup.Tree
	Calls      []string
}

// live acts as a daemon that dies at a fail point. It returns an error if it survives.
func (v victim) live() error {
	d, err := New(Config{Root: v.Root, Virtiofsd: v.Virtiofsd, Accel: AccelTCG, Cgroup: v.Cgroups})
	if err != nil {
		return err
	}
	return machinetest.Live(d, v.Definition, v.Calls)
}

// TestKilledAnywhere (faults N1): after a kill of the daemon at each fail point, the next daemon knows the machine's
// state, runs at most one QEMU for it, and can start it.
func TestKilledAnywhere(t *testing.T) {
	failpoint.Needed(t)
	start := []string{"define", "start"}
	end := []string{"define", "start", "end"}
	destroy := []string{"define", "start", "destroy"}
	any := []machine.Phase{machine.Defined, machine.Running}
	plan := map[string]struct {
		calls  []string
		phases []machine.Phase
		cause  machine.Cause
		saved  bool // the machine continues from a saved state
	}{
		"qemu.define.dir":        {calls: start},
		"qemu.undefine.removing": {calls: []string{"define", "undefine"}, phases: any},
		"qemu.start.intent":      {calls: start, phases: any},
		"qemu.start.opened":      {calls: start, phases: any},
		"qemu.start.spawned":     {calls: start, phases: any[1:]},
		"qemu.start.recorded":    {calls: start, phases: any[1:]},
		"qemu.start.greeted":     {calls: start, phases: any[1:]},
		"qemu.start.running":     {calls: start, phases: any[1:]},
		"qemu.start.filled":      {calls: start, phases: any, saved: true},
		"qemu.start.continued":   {calls: start, phases: any[1:], saved: true},
		"qemu.save.saved":        {calls: []string{"define", "start", "save"}, phases: any[1:]},
		"qemu.end.verdict":       {calls: end, phases: []machine.Phase{machine.Ended}, cause: machine.CausePowerOff},
		"qemu.end.ended":         {calls: end, phases: []machine.Phase{machine.Ended}, cause: machine.CausePowerOff},
		"qemu.destroy.intent":    {calls: destroy, phases: []machine.Phase{machine.Ended}, cause: machine.CauseKilled},
		"qemu.destroy.killed":    {calls: destroy, phases: []machine.Phase{machine.Ended}, cause: machine.CauseKilled},
	}
	points := failpoint.Names()
	for point := range plan {
		if !slices.Contains(points, point) {
			t.Errorf("fail point %s does not exist", point)
		}
	}
	for _, point := range points {
		if !strings.HasPrefix(point, "qemu.") {
			continue
		}
		t.Run(point, func(t *testing.T) {
			p, ok := plan[point]
			if !ok {
				t.Fatal("the plan has no entry for this fail point")
			}
			s := subject(t)
			d := s.Definition(t)
			if p.saved {
				l := s.Begin(t)
				d = another(t, s, saved(t, s, l, "true"))
				l.Close()
			}
			if d.Plug = p.saved || slices.Contains(p.calls, "save"); p.saved || !d.Plug {
				machinetest.AddShare(t, &d)
			}
			if slices.Contains(p.calls, "end") {
				d.Cmdline += ` tripod.noshell tripod.run="poweroff -f"`
			}
			root := filepath.Join(t.TempDir(), "qemu")
			s.New = driverOver(root)
			die(t, point, victim{Root: root, Virtiofsd: machinetest.FindVirtiofsd(t), Definition: d, Cgroups: machinetest.Cgroups(t),
				Calls: p.calls})
			l := s.Begin(t, d.Name)
			defer l.Close()
			found, there := l.Found[d.Name]
			if there != (p.phases != nil) || there && !slices.Contains(p.phases, found.Phase) || found.Cause != p.cause {
				t.Errorf("Recover found %+v (present: %t), want a phase of %v with cause %q", found, there, p.phases, p.cause)
			}
			want := 0
			if found.Phase == machine.Running {
				want = 1
			}
			machinetest.AwaitMachines(t, d, want)
			if err := l.Define(t.Context(), d); err != nil {
				t.Fatalf("define: %v", err)
			}
			if err := l.Start(t.Context(), d.Name); err != nil {
				t.Fatalf("start: %v", err)
			}
			machinetest.AwaitMachines(t, d, 1)
			if err := l.Undefine(t.Context(), d.Name); err != nil {
				t.Fatalf("undefine: %v", err)
			}
			machinetest.AwaitMachines(t, d, 0)
			if left, err := os.ReadDir(root); err != nil || len(left) != 0 {
				t.Errorf("files left behind: %v (error %v)", left, err)
			}
			if _, err := os.Stat(d.Dir); err == nil {
				t.Errorf("directory %s still exists", d.Dir)
			}
		})
	}
}

// die runs a victim, which the fail point kills.
func die(t *testing.T, point string, v victim) {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victimEnv+"="+string(raw), failpoint.Variable+"="+point+"=kill")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the victim was not killed at %s: %v %s", point, err, stderr.String())
	}
}
