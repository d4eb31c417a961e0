package qemu

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// TestCausesOfEvents: causeOf recognizes the events that report the end of a machine.
func TestCausesOfEvents(t *testing.T) {
	for _, c := range []struct {
		event, data string
		want        machine.Cause
	}{
		{"SHUTDOWN", `{"guest": true, "reason": "guest-shutdown"}`, machine.CausePowerOff},
		{"SHUTDOWN", `{"guest": true, "reason": "guest-panic"}`, machine.CausePanic},
		{"SHUTDOWN", `{"guest": true, "reason": "guest-reset"}`, ""},
		{"SHUTDOWN", `{"guest": false, "reason": "host-signal"}`, ""},
		{"SHUTDOWN", `{"guest": false, "reason": "host-qmp-quit"}`, ""},
		{"SHUTDOWN", `[]`, ""},
		{"SHUTDOWN", ``, ""},
		{"GUEST_PANICKED", `{"action": "pause"}`, machine.CausePanic},
		{"RESET", `{"guest": true, "reason": "guest-reset"}`, ""},
		{"STOP", `{}`, ""},
		{"POWERDOWN", `{}`, ""},
	} {
		if got := causeOf(qmp.Event{Name: c.event, Data: json.RawMessage(c.data)}); got != c.want {
			t.Errorf("causeOf(%s %s) = %q, want %q", c.event, c.data, got, c.want)
		}
	}
	for _, at := range []time.Time{{}, time.Now().Add(time.Hour), time.Unix(5, 0)} {
		if got := eventTime(qmp.Event{Time: at}); time.Since(got).Abs() > time.Minute {
			t.Errorf("eventTime(%s) = %s, want about now", at, got)
		}
	}
}

// TestVerdicts: endedRecord prefers the most certain cause of an end, and only a power-off has exit code 0.
func TestVerdicts(t *testing.T) {
	log := filepath.Join(t.TempDir(), logFile)
	if err := os.WriteFile(log, []byte("qemu-system-x86_64: out of \x1b[1mluck\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	started := time.Now().Add(-time.Minute)
	for name, c := range map[string]struct {
		rec   record
		run   *run
		oom   bool
		cause machine.Cause
		code  int32
		says  string
	}{
		"power-off": {record{Verdict: machine.CausePowerOff, Killing: true}, nil, true, machine.CausePowerOff, 0,
			"turned itself off"},
		"panic":            {record{Verdict: machine.CausePanic}, nil, false, machine.CausePanic, 134, "panicked"},
		"QEMU's own error": {record{Verdict: machine.CauseFailed}, nil, false, machine.CauseFailed, 255, "out of ?[1mluck"},
		"killed by us":     {record{Killing: true}, nil, true, machine.CauseKilled, 137, "killed"},
		"out of memory":    {record{}, nil, true, machine.CauseOOM, 137, "out of memory"},
		"unknown":          {record{}, nil, false, machine.CauseFailed, 137, "unknown reason"},
		"a signal": {record{}, &run{statusKnown: true, status: unix.WaitStatus(unix.SIGSEGV)}, false, machine.CauseFailed, 139,
			"segmentation fault"},
		"an exit code":          {record{}, &run{statusKnown: true, status: 3 << 8}, false, machine.CauseFailed, 3, "code 3"},
		"ended on request":      {record{}, &run{statusKnown: true}, false, machine.CauseFailed, 255, "by itself"},
		"while it was starting": {record{Step: stepStarting}, &run{statusKnown: true, status: 1 << 8}, false, machine.CauseStart, 1, "luck"},
	} {
		c.rec.StartedAt = started
		got := endedRecord(c.rec, c.run, c.oom, log)
		if got.Step != stepEnded || got.Cause != c.cause || got.ExitCode != c.code || !strings.Contains(got.Message, c.says) ||
			got.FinishedAt.Before(started) {
			t.Errorf("endedRecord (%s) = %+v, want cause %s, code %d, a message with %q", name, got, c.cause, c.code, c.says)
		}
	}
}

// TestDamagedRecords: truncated files and other versions are data loss, and a full disk is an exhausted resource.
func TestDamagedRecords(t *testing.T) {
	path := filepath.Join(t.TempDir(), stateFile)
	var r record
	if err := readJSON(path, &r); !isNotExist(err) {
		t.Errorf("readJSON of a missing file: got error %v, want fs.ErrNotExist", err)
	}
	for _, content := range []string{"", "{", `{"version": 2}`, `{"version": "1"}`, "[]"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := readJSON(path, &r); !errdefs.IsDataLoss(err) {
			t.Errorf("readJSON of %q: got error %v, want ErrDataLoss", content, err)
		}
	}
	want := record{Version: recordVersion, Step: stepRunning, Boot: machine.BootID(), StartedAt: time.Now().Round(0).UTC()}
	if err := writeJSON(path, want, true); err != nil {
		t.Fatal(err)
	}
	if err := readJSON(path, &r); err != nil || !reflect.DeepEqual(r, want) {
		t.Errorf("readJSON = %+v, %v; want %+v", r, err, want)
	}
	if err := writeJSON("/dev/full/x", want, false); err == nil {
		t.Error("writeJSON below a device succeeded")
	}
	if err := withClass(unix.ENOSPC); !errdefs.IsResourceExhausted(err) {
		t.Errorf("withClass(ENOSPC) = %v, want ErrResourceExhausted", err)
	}
	if err := withClass(errors.New("odd")); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("withClass(odd) = %v, want ErrFailedPrecondition", err)
	}
}

// TestRemovedWhenDamaged: Recover removes a machine whose record is damaged. The machine can then be defined again.
func TestRemovedWhenDamaged(t *testing.T) {
	s := subject(t)
	d := s.Definition(t)
	root := filepath.Join(t.TempDir(), "qemu")
	s.New = driverOver(root)
	for _, file := range []string{definitionFile, stateFile} {
		l := s.Begin(t)
		if err := l.Define(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		if err := l.Start(t.Context(), d.Name); err != nil {
			t.Fatal(err)
		}
		l.Close()
		if err := os.WriteFile(filepath.Join(root, d.Name, file), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		l = s.Begin(t, d.Name)
		if len(l.Found) != 0 {
			t.Errorf("Recover with a damaged %s found %v, want nothing", file, l.Found)
		}
		machinetest.AwaitMachines(t, d, 0) // either file suffices to find its processes
		l.Close()
	}
	if left, err := os.ReadDir(root); err != nil || len(left) != 0 {
		t.Errorf("files left behind: %v (error %v)", left, err)
	}
}
