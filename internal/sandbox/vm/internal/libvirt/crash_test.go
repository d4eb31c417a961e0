package libvirt

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
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// victimEnv is the environment variable with the orders, as JSON, for a process that dies at a fail point.
const victimEnv = "TRIPOD_LIBVIRT_VICTIM"

type victim struct {
	URI, Dir, Owner, Wrapper, Virtiofsd, Accel string
	Cgroups                                    cgroup.Tree
	Definition                                 machine.Definition
	Calls                                      []string
}

// live acts as a daemon that dies at a fail point. It returns an error if it survives.
func (v victim) live() error {
	d, err := New(Config{URI: v.URI, Dir: v.Dir, Owner: v.Owner, Wrapper: v.Wrapper, Virtiofsd: v.Virtiofsd, Accel: v.Accel,
		Cgroup: v.Cgroups})
	if err != nil {
		return err
	}
	return machinetest.Live(d, v.Definition, v.Calls)
}

// TestKilledAnywhere (faults N1): after a kill of the daemon at each fail point, the next daemon knows the machine's
// state, runs at most one QEMU for it, and can start it.
func TestKilledAnywhere(t *testing.T) {
	failpoint.Needed(t)
	define, start := []string{"define", "undefine"}, []string{"define", "start"}
	end, destroy := []string{"define", "start", "end"}, []string{"define", "start", "destroy"}
	plan := map[string]struct {
		calls []string
		phase machine.Phase
		cause machine.Cause
	}{
		"libvirt.define.domain":      {define, machine.Defined, ""},
		"libvirt.undefine.forgotten": {define, machine.Defined, ""},
		"libvirt.start.opened":       {start, machine.Defined, ""},
		"libvirt.start.defined":      {start, machine.Defined, ""},
		"libvirt.start.granted":      {start, machine.Ended, machine.CauseFailed},
		"libvirt.start.created":      {start, machine.Running, ""},
		"libvirt.end.known":          {end, machine.Ended, machine.CausePowerOff},
		"libvirt.end.written":        {end, machine.Ended, machine.CausePowerOff},
		"libvirt.destroy.intent":     {destroy, machine.Ended, machine.CauseKilled},
		"libvirt.destroy.dead":       {destroy, machine.Ended, machine.CauseKilled},
	}
	r := newRig(t)
	for _, point := range failpoint.Names() {
		if !strings.HasPrefix(point, "libvirt.") {
			continue
		}
		t.Run(point, func(t *testing.T) {
			p, ok := plan[point]
			require.True(t, ok, "the plan has no entry for this fail point")
			s := r.subject(t)
			d := s.Definition(t)
			machinetest.AddShare(t, &d)
			if slices.Contains(p.calls, "end") {
				d.Cmdline += ` tripod.noshell tripod.run="poweroff -f"`
			}
			r.die(t, point, victim{Definition: d, Calls: p.calls})
			l := s.Begin(t, d.Name)
			defer l.Close()
			require.Contains(t, l.Found, d.Name)
			require.Eventually(t, func() bool { return l.MustState(d.Name).Phase == p.phase }, time.Minute, 20*time.Millisecond, "Recover found %+v",
				l.Found[d.Name])
			require.Equal(t, p.cause, l.MustState(d.Name).Cause)
			machinetest.AwaitMachines(t, d, map[machine.Phase]int{machine.Running: 1}[p.phase])
			require.NoError(t, l.Define(t.Context(), d))
			require.NoError(t, l.Start(t.Context(), d.Name))
			machinetest.AwaitMachines(t, d, 1)
			require.NoError(t, l.Undefine(t.Context(), d.Name))
			machinetest.AwaitMachines(t, d, 0)
			require.Empty(t, entries(t, filepath.Join(r.cfg.Dir, "machines")))
			require.NoDirExists(t, d.Dir)
			require.NoFileExists(t, filepath.Join(d.StateDir, runFile))
		})
	}
}

// die runs a victim, which the fail point kills.
func (r rig) die(t *testing.T, point string, v victim) {
	t.Helper()
	v.URI, v.Dir, v.Owner, v.Wrapper, v.Virtiofsd, v.Accel, v.Cgroups = r.URI, r.cfg.Dir, r.cfg.Owner, r.cfg.Wrapper, r.cfg.Virtiofsd,
		r.cfg.Accel, r.cfg.Cgroup
	raw, err := json.Marshal(v)
	require.NoError(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victimEnv+"="+string(raw), failpoint.Variable+"="+point+"=kill")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	err = cmd.Run()
	exit, ok := errors.AsType[*exec.ExitError](err)
	require.True(t, ok && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL, "the victim was not killed at %s: %v %s", point, err,
		stderr.String())
}
