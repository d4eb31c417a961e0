package ledger

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// state is a kind's state of a container.
type state struct {
	Record
	Worker string `json:"worker,omitempty"`
}

func (s state) Status() sandbox.Status { return s.StatusOf(7) }

// run is one run of a container.
type run struct{ number int }

type rig struct {
	*testing.T
	*Ledger[state, run]
	dir    string
	events []sandbox.Event
}

func newRig(t *testing.T) *rig {
	r := &rig{T: t, dir: t.TempDir()}
	r.restart()
	return r
}

// restart replaces the ledger with one that has nothing in memory, as a new daemon does.
func (r *rig) restart() {
	r.Ledger = New[state, run](1, func(podID, id string) string { return filepath.Join(r.dir, podID+"-"+id+".json") },
		slog.New(slog.DiscardHandler))
	r.ReportTo(func(e sandbox.Event) { r.events = append(r.events, e) })
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) created() *Handle[state, run] {
	r.Helper()
	r.must(r.Create("pod", "c", state{Record: Record{ID: "c", Phase: Created}}))
	h, err := r.Get("pod", "c")
	r.must(err)
	return h
}

func (r *rig) wantState(want sandbox.State) sandbox.Status {
	r.Helper()
	got, err := r.Status("pod", "c")
	r.must(err)
	if got.State != want {
		r.Errorf("Status = %+v, want state %d", got, want)
	}
	return got
}

func TestLookups(t *testing.T) {
	r := newRig(t)
	lookups := func(when string, exists, runs bool) {
		t.Helper()
		h, err := r.Find("pod", "c")
		if err != nil || (h != nil) != exists {
			t.Errorf("%s: Find = %v, %v; want a handle: %t", when, h, err, exists)
		}
		if _, err := r.Get("pod", "c"); (err == nil) != exists || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: Get error = %v, want ErrFailedPrecondition unless the container exists (%t)", when, err, exists)
		}
		if _, _, err := r.GetRun("pod", "c"); (err == nil) != runs || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: GetRun error = %v, want ErrFailedPrecondition unless the container runs (%t)", when, err, runs)
		}
	}
	lookups("absent", false, false)
	r.wantState(sandbox.StateAbsent)
	h := r.created()
	lookups("created", true, false)
	l := &run{1}
	r.must(h.Begin(l, func(s *state) { s.Start() }))
	lookups("started", true, true)
	if s := r.wantState(sandbox.StateRunning); s.Pid != 7 || s.StartedAt.IsZero() {
		t.Errorf("status of the running container = %+v, want PID 7 and a start time", s)
	}
	h.End(l, func(s *state) { s.Exit(time.Now(), 3, sandbox.ReasonError, "over") })
	lookups("exited", true, false)
	r.must(r.Remove("pod", "c"))
	lookups("removed", false, false)
	r.must(r.Remove("pod", "c"))
}

func TestFirstEndCounts(t *testing.T) {
	r := newRig(t)
	h, l := r.created(), &run{1}
	r.must(h.Begin(l, func(s *state) { s.Start() }))
	for i := range int32(2) {
		_, ended := h.End(l, func(s *state) { s.Exit(time.Time{}, 3+i, sandbox.ReasonError, "") })
		if ended != (i == 0) {
			t.Errorf("End number %d reports %t", i, ended)
		}
	}
	if s := r.wantState(sandbox.StateExited); s.ExitCode != 3 || s.FinishedAt.Before(s.StartedAt) {
		t.Errorf("status = %+v, want the exit code of the first End", s)
	}
	if present, err := h.Update(l, func(s *state) { s.Worker = "late" }); present || err != nil {
		t.Errorf("Update of an ended run = %t, %v; want false, nil", present, err)
	}
	h.UpdateInMemory(l, func(s *state) { s.Worker = "late" })
	if s, _ := h.Snapshot(); s.Worker != "" {
		t.Errorf("an ended run changed the state to %+v", s)
	}
}

// TestStateSurvives: a new daemon finds the state that the previous one wrote to the file, and no run.
func TestStateSurvives(t *testing.T) {
	r := newRig(t)
	h, l := r.created(), &run{1}
	r.must(h.Begin(l, func(s *state) { s.Start() }))
	if _, err := h.Update(l, func(s *state) { s.Worker = "w" }); err != nil {
		t.Fatal(err)
	}
	r.restart()
	if r.Loaded("c") != nil {
		t.Error("the new ledger has read a state file that no lookup asked for")
	}
	r.wantState(sandbox.StateRunning)
	h = r.Loaded("c")
	if s, now := h.Snapshot(); s.Phase != Started || s.Worker != "w" || now != nil {
		t.Errorf("state %+v, run %v; want phase started, worker w and no run", s, now)
	}
	h.Adopt(l)
	if _, now, err := r.GetRun("pod", "c"); now != l || err != nil {
		t.Errorf("GetRun after Adopt = %v, %v; want the adopted run", now, err)
	}
}

// TestBeginFails: if the state file cannot be written, a run does not begin and a container is not created.
func TestBeginFails(t *testing.T) {
	r := newRig(t)
	h := r.created()
	r.must(os.RemoveAll(r.dir))
	if err := h.Begin(&run{1}, func(s *state) { s.Start() }); err == nil {
		t.Error("Begin succeeded without a state file")
	}
	if s, l := h.Snapshot(); s.Phase != Created || l != nil {
		t.Errorf("after a failed Begin: state %+v, run %v; want phase created and no run", s, l)
	}
	if err := r.Create("pod", "other", state{}); err == nil || r.Loaded("other") != nil {
		t.Errorf("Create without a state file: error %v, handle %v; want an error and no handle", err, r.Loaded("other"))
	}
}

func TestStartError(t *testing.T) {
	r := newRig(t)
	r.must(r.created().Set(func(s *state) { s.FailStart(fmt.Errorf("no such program")) }))
	s := r.wantState(sandbox.StateExited)
	if s.ExitCode != sandbox.ExitStartError || s.Reason != sandbox.ReasonStartError || s.Message != "no such program" ||
		!s.StartedAt.Equal(s.FinishedAt) {
		t.Errorf("status = %+v, want a start error whose start and end are equal", s)
	}
}

func TestEvents(t *testing.T) {
	r := newRig(t)
	r.Report(sandbox.Event{PodID: "first"})
	r.ReportTo(nil)
	r.Report(sandbox.Event{PodID: "second"})
	if len(r.events) != 1 || r.events[0].PodID != "first" {
		t.Errorf("reported %v, want the first event only", r.events)
	}
}

// TestForeignFiles: a file of an earlier program with the same version is read, a file of another version is refused
// and left alone, and a torn file counts as missing.
func TestForeignFiles(t *testing.T) {
	for name, c := range map[string]struct {
		content string
		want    func(error) bool
	}{
		"earlier":    {`{"id":"c","phase":"exited","worker":"w","version":1,"exitCode":3}`, func(err error) bool { return err == nil }},
		"newer":      {`{"version":2,"phase":{"name":"exited"}}`, errdefs.IsFailedPrecondition},
		"no version": {`{"id":"c","phase":"exited"}`, errdefs.IsFailedPrecondition},
		"torn":       {`{"version":1,"id":"c","pha`, errdefs.IsNotFound},
		"other type": {`{"version":1,"phase":7}`, errdefs.IsNotFound},
		"empty":      {``, errdefs.IsNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			path := r.file("pod", "c")
			r.must(os.WriteFile(path, []byte(c.content), 0o600))
			var s state
			if err := Format(1).Read(path, &s); !c.want(err) {
				t.Errorf("Read error = %v", err)
			}
			h, err := r.Find("pod", "c")
			if errdefs.IsFailedPrecondition(err) != (name == "newer" || name == "no version") || (h != nil) != (name == "earlier") {
				t.Errorf("Find = %v, %v", h, err)
			}
			if name == "earlier" && (s.Phase != Exited || s.ExitCode != 3 || s.Worker != "w") {
				t.Errorf("Read = %+v, want phase exited, exit code 3 and worker w", s)
			}
			if raw, err := os.ReadFile(path); err != nil || string(raw) != c.content {
				t.Errorf("the file now has %q, %v; want it unchanged", raw, err)
			}
		})
	}
}

// TestFileFormat pins the format of a state file, which other versions of this program read.
func TestFileFormat(t *testing.T) {
	r := newRig(t)
	at := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	r.must(r.created().Set(func(s *state) {
		s.StartedAt, s.Worker = at, "w"
		s.Exit(at.Add(time.Second), 3, "Error", "over")
	}))
	raw, err := os.ReadFile(r.file("pod", "c"))
	r.must(err)
	want := `{"version":1,"id":"c","phase":"exited","startedAt":"2026-11-22T10:00:00Z","finishedAt":"2026-11-22T10:00:01Z",` +
		`"exitCode":3,"reason":"Error","message":"over","worker":"w"}`
	if string(raw) != want {
		t.Errorf("the file has\n%s\nwant\n%s", raw, want)
	}
	if left, err := filepath.Glob(r.dir + "/*.new"); err != nil || left != nil {
		t.Errorf("temporary files left behind: %s", strings.Join(left, " "))
	}
}
