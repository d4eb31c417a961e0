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

// state is what a kind might keep.
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

// restart forgets all that is in memory, as a new daemon does.
func (r *rig) restart() {
	r.Ledger = New[state, run](1, func(podID, id string) string { return filepath.Join(r.dir, podID+"-"+id+".json") }, slog.New(slog.DiscardHandler))
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
		r.Errorf("the status is %+v, want state %d", got, want)
	}
	return got
}

func TestLookups(t *testing.T) {
	r := newRig(t)
	lookups := func(when string, exists, runs bool) {
		t.Helper()
		h, err := r.Find("pod", "c")
		if err != nil || (h != nil) != exists {
			t.Errorf("%s: Find gives %v, %v", when, h, err)
		}
		if _, err := r.Get("pod", "c"); (err == nil) != exists || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: Get says %v", when, err)
		}
		if _, _, err := r.GetRun("pod", "c"); (err == nil) != runs || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: GetRun says %v", when, err)
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
		t.Errorf("it runs as %+v", s)
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
			t.Errorf("end %d: %t", i, ended)
		}
	}
	if s := r.wantState(sandbox.StateExited); s.ExitCode != 3 || s.FinishedAt.Before(s.StartedAt) {
		t.Errorf("it ended as %+v", s)
	}
	if present, err := h.Update(l, func(s *state) { s.Worker = "late" }); present || err != nil {
		t.Errorf("a run that has ended was updated: %t, %v", present, err)
	}
	h.UpdateInMemory(l, func(s *state) { s.Worker = "late" })
	if s, _ := h.Snapshot(); s.Worker != "" {
		t.Errorf("a run that has ended changed the state: %+v", s)
	}
}

// TestStateSurvives: a new daemon finds in the file what the one before it wrote, and no run.
func TestStateSurvives(t *testing.T) {
	r := newRig(t)
	h, l := r.created(), &run{1}
	r.must(h.Begin(l, func(s *state) { s.Start() }))
	if _, err := h.Update(l, func(s *state) { s.Worker = "w" }); err != nil {
		t.Fatal(err)
	}
	r.restart()
	if r.Loaded("c") != nil {
		t.Error("the new ledger has read a file that nobody asked for")
	}
	r.wantState(sandbox.StateRunning)
	h = r.Loaded("c")
	if s, now := h.Snapshot(); s.Phase != Started || s.Worker != "w" || now != nil {
		t.Errorf("found %+v, %v", s, now)
	}
	h.Adopt(l)
	if _, now, err := r.GetRun("pod", "c"); now != l || err != nil {
		t.Errorf("after recovery it runs as %v, %v", now, err)
	}
}

// TestBeginFails: a start that cannot be recorded has not begun.
func TestBeginFails(t *testing.T) {
	r := newRig(t)
	h := r.created()
	r.must(os.RemoveAll(r.dir))
	if err := h.Begin(&run{1}, func(s *state) { s.Start() }); err == nil {
		t.Error("begun without a record")
	}
	if s, l := h.Snapshot(); s.Phase != Created || l != nil {
		t.Errorf("after a failed Begin: %+v, %v", s, l)
	}
	if err := r.Create("pod", "other", state{}); err == nil || r.Loaded("other") != nil {
		t.Errorf("created without a record: %v, %v", err, r.Loaded("other"))
	}
}

func TestStartError(t *testing.T) {
	r := newRig(t)
	r.must(r.created().Set(func(s *state) { s.FailStart(fmt.Errorf("no such program")) }))
	s := r.wantState(sandbox.StateExited)
	if s.ExitCode != sandbox.ExitStartError || s.Reason != sandbox.ReasonStartError || s.Message != "no such program" || !s.StartedAt.Equal(s.FinishedAt) {
		t.Errorf("it ended as %+v", s)
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

// TestFilesOfOthers: files as earlier programs wrote them are read; what another version wrote is refused and left alone, and a
// torn file is taken for none.
func TestFilesOfOthers(t *testing.T) {
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
				t.Errorf("Read says %v", err)
			}
			h, err := r.Find("pod", "c")
			if errdefs.IsFailedPrecondition(err) != (name == "newer" || name == "no version") || (h != nil) != (name == "earlier") {
				t.Errorf("Find gives %v, %v", h, err)
			}
			if name == "earlier" && (s.Phase != Exited || s.ExitCode != 3 || s.Worker != "w") {
				t.Errorf("read %+v", s)
			}
			if raw, err := os.ReadFile(path); err != nil || string(raw) != c.content {
				t.Errorf("the file is now %q, %v", raw, err)
			}
		})
	}
}

// TestFileFormat pins what a state file looks like to other versions of this program.
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
		t.Errorf("the file is\n%s\nwant\n%s", raw, want)
	}
	if left, err := filepath.Glob(r.dir + "/*.new"); err != nil || left != nil {
		t.Errorf("left behind: %s", strings.Join(left, " "))
	}
}
