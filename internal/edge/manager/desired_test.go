package manager

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// desire publishes the desired document of a runtime.
func (r *rig) desire(rt string, generation int, modules ...map[string]any) {
	r.publish(topics.Desired(rt), true, object(map[string]any{"generation": generation, "modules": modules}))
}

// reported waits for a reported document of the runtime for which the condition holds, and returns the document.
func (r *rig) reported(rt string, want func(reported) bool) (got reported) {
	r.t.Helper()
	r.find(r.t, topics.Reported(rt), 1, func(m mqtt.Message) bool {
		got = reported{}
		return json.Unmarshal(m.Payload, &got) == nil && m.Retain && want(got)
	})
	return got
}

func (r *rig) states(rt string, generation string, want map[string]string) {
	r.t.Helper()
	r.reported(rt, func(got reported) bool {
		if string(got.Generation) != generation || len(got.Modules) != len(want) {
			return false
		}
		for _, mod := range got.Modules {
			if want[mod.UUID] != mod.State {
				return false
			}
		}
		return true
	})
}

// module returns the module of the reported document, or an empty one.
func (r reported) module(uuid string) reportedModule {
	for _, mod := range r.Modules {
		if mod.UUID == uuid {
			return mod
		}
	}
	return reportedModule{}
}

// TestDesiredState: new modules of the document are created, removed ones deleted and changed ones replaced; modules of
// another origin do not change.
func TestDesiredState(t *testing.T) {
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("other"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.desire(runtimeA, 1, moduleData("d1"), moduleData("d2", "args", []string{"a"}))
	r.a.find(t, true, 1, wire.Create, 1)
	r.a.find(t, true, 2, wire.Create, 1)
	r.states(runtimeA, "1", map[string]string{"other": "running", "d1": "running", "d2": "running"})
	r.desire(runtimeA, 2, moduleData("d2", "args", []string{"b"}))
	r.a.find(t, true, 1, wire.Delete, 1)
	r.a.find(t, true, 2, wire.Delete, 1)
	r.a.tell(t, true, 1, wire.Exited, `{}`)
	r.a.tell(t, true, 2, wire.Exited, `{}`)
	r.exitedOf(runtimeA, "d1", 1)
	r.exitedOf(runtimeA, "d2", 1)
	if again := r.a.find(t, true, -1, wire.Create, 4); again.Module == 0 {
		t.Errorf("created again at %d", again.Module)
	}
	r.states(runtimeA, "2", map[string]string{"other": "running", "d2": "running"})
	r.publish(topics.Desired(runtimeA), true, nil) // the document is gone
	r.a.find(t, true, -1, wire.Delete, 3)
	if n := r.count(isError); n != 0 {
		t.Errorf("%d errors, want 0", n)
	}
}

// TestDesiredPoison: an invalid document is answered even if it is retained, and the previous one stays in force.
func TestDesiredPoison(t *testing.T) {
	r := newRig(t, nil)
	r.desire(runtimeA, 1, moduleData("d"))
	r.a.find(t, true, 0, wire.Create, 1)
	for i, poison := range []string{`{`, `[]`, `{"modules": 7}`, `{"modules": [{"name": "without uuid"}]}`,
		`{"modules": [{"uuid": "x"}, {"uuid": "x"}]}`, `{"modules": [null]}`} {
		r.publish(topics.Desired(runtimeA), true, []byte(poison))
		r.errorWith(i + 1)
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("after"))
	r.a.find(t, true, 1, wire.Create, 1)
	if n := r.a.count(true, wire.Delete); n != 0 {
		t.Errorf("%d modules deleted, want 0", n)
	}
}

// TestDesiredRestart: modules restart according to their policy. A module that is not restarted stays ended after a
// restart of the daemon. None of this needs a broker.
func TestDesiredRestart(t *testing.T) {
	r := newRig(t, nil)
	r.desire(runtimeA, 1, moduleData("always"), moduleData("failure", "restart", "on-failure"), moduleData("never", "restart", "never"))
	for i := range 3 {
		r.a.find(t, true, i, wire.Create, 1)
	}
	ok, bad := `{"status": {"code": 0, "reason": "exited"}}`, `{"status": {"code": 1, "reason": "trap"}}`
	r.a.tell(t, true, 0, wire.Exited, ok)
	r.a.find(t, true, 0, wire.Create, 2)
	r.a.tell(t, true, 1, wire.Exited, bad)
	r.a.find(t, true, 1, wire.Create, 2)
	r.a.tell(t, true, 1, wire.Exited, ok)
	r.exitedOf(runtimeA, "failure", 2)
	r.a.tell(t, true, 2, wire.Exited, bad)
	r.exitedOf(runtimeA, "never", 1)
	r.states(runtimeA, "1", map[string]string{"always": "running", "failure": "finished", "never": "finished"})
	r.close()
	r.set(func(b *bus) { b.away = true })
	r.open()
	r.a.find(t, true, 0, wire.Create, 3)
	r.client().connect()
	r.desire(runtimeA, 2, moduleData("always"), moduleData("failure", "restart", "on-failure", "args", []string{"new"}),
		moduleData("never", "restart", "never"))
	r.a.find(t, true, 1, wire.Create, 3) // other data: it is another module
	r.states(runtimeA, "2", map[string]string{"always": "running", "failure": "running", "never": "finished"})
	if n := r.a.count(true, wire.Create); n != 7 {
		t.Errorf("%d creates, want 7", n)
	}
}

// TestReportedEnds: the reported document has how desired modules have ended, also after a restart of the daemon, and why
// they cannot be created.
func TestReportedEnds(t *testing.T) {
	r, o := ownRig(t)
	r.desire(runtimeA, 1, moduleData("once", "restart", "never"), moduleData("again"))
	r.states(runtimeA, "1", map[string]string{"once": "running", "again": "running"})
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 3, "reason": "exited", "message": "no"}}`)
	r.a.tell(t, true, 1, wire.Exited, `{"status": {"code": 134, "reason": "trap"}}`)
	ended := func(got reported) bool {
		once, again := got.module("once"), got.module("again")
		return once.State == reportedFinished && once.Reason == "exited" && string(once.Exit) == `{"code":3,"reason":"exited","message":"no"}` &&
			once.Restarts == 0 &&
			once.Origin == fromDesired && once.Index == nil && again.State == "running" && again.Reason == "trap" && again.Restarts == 1
	}
	r.reported(runtimeA, ended)
	r.close()
	r.set(func(b *bus) { b.log = nil })
	r.open()
	r.reported(runtimeA, ended)
	o.create = func(int, wire.ModuleData) error { return errors.New("no such program") }
	r.desire(runtimeA, 2, moduleData("bad"), moduleData("worse", "restart", "never"))
	got := r.reported(runtimeA, func(got reported) bool {
		bad, worse := got.module("bad"), got.module("worse")
		return bad.State == reportedWaiting && bad.RetryAt != nil && bad.Restarts > 1 && worse.State == reportedFinished && worse.RetryAt == nil
	})
	for _, uuid := range []string{"bad", "worse"} {
		if mod := got.module(uuid); mod.Error != "no such program" || mod.Reason != "exited" {
			t.Errorf("the report of %s is %+v, want the error of its creation", uuid, mod)
		}
	}
	r.publish(topics.Desired(runtimeA), true, []byte(`{"modules": 7}`))
	got = r.reported(runtimeA, func(got reported) bool { return got.Error != "" })
	if !strings.Contains(got.Error, "not a list of modules") || string(got.Generation) != "2" {
		t.Errorf("the report of a refused document is %+v, want its error and the generation before", got)
	}
	r.desire(runtimeA, 3)
	r.reported(runtimeA, func(got reported) bool {
		return got.Error == "" && string(got.Generation) == "3" && got.module("worse").UUID == ""
	})
}

// TestReportedRetry: a module that cannot be created now is reported with the error and the time of the next attempt.
func TestReportedRetry(t *testing.T) {
	r, o := ownRig(t)
	o.create = func(int, wire.ModuleData) error { return fmt.Errorf("no room yet: %w", errdefs.ErrUnavailable) }
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	got := r.reported(runtimeA, func(got reported) bool { return got.module("m").RetryAt != nil }).module("m")
	if got.State != "pending" || !strings.Contains(got.Error, "no room yet") {
		t.Errorf("the report is %+v, want pending with the error", got)
	}
	r.order(runtimeB, wire.ActionCreate, moduleData("taken"))
	r.b.find(t, true, 0, wire.Create, 1)
	r.desire(runtimeA, 1, moduleData("taken"))
	got = r.reported(runtimeA, func(got reported) bool { return got.module("taken").Error != "" }).module("taken")
	if got.State != reportedWaiting || got.RetryAt == nil || !strings.Contains(got.Error, "has a module with this uuid") {
		t.Errorf("the report is %+v, want waiting with the error", got)
	}
}

// TestReportIsBounded: neither the size of an exit nor the number of finished modules is the size of the document.
func TestReportIsBounded(t *testing.T) {
	exit := reportedExit([]byte(`{"status": {"code": 3, "reason": "exited", "message": "` + strings.Repeat("x", 1<<20) + `"}}`))
	var s exitStatus
	if err := json.Unmarshal(exit, &s); err != nil || len(exit) > maxReportedExit || s.Code != 3 || s.Reason != "exited" ||
		!strings.HasPrefix(s.Message, "xxx") {
		t.Errorf("a status of 1 MiB is reported as %d bytes with %+v, %v", len(exit), s, err)
	}
	if got := reportedExit([]byte(`{"status": "exited", "exit_code": 7}`)); string(got) != `{"code":7,"message":"","reason":"exited"}` {
		t.Errorf("a public peer's exit is reported as %s", got)
	}
	modules := make([]wire.ModuleData, maxReportedAbsent+3)
	for i := range modules {
		modules[i], _ = wire.ParseModuleData(object(moduleData(fmt.Sprint("d", i))))
	}
	r := newRig(t, nil)
	h := newHost(r.m, r.a)
	h.desired.Store(&desired{modules: modules})
	if got := h.reportNow(); len(got.Modules) != maxReportedAbsent || got.Omitted != 3 {
		t.Errorf("%d modules are reported and %d omitted, want %d and 3", len(got.Modules), got.Omitted, maxReportedAbsent)
	}
}

// TestEndsOfAnEarlierDaemon: a record that is only the module's data, as earlier daemons wrote it, keeps the module ended.
func TestEndsOfAnEarlierDaemon(t *testing.T) {
	r := newRig(t, nil)
	r.desire(runtimeA, 1, moduleData("old", "restart", "never"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 0, "reason": "exited"}}`)
	r.states(runtimeA, "1", map[string]string{"old": "finished"})
	r.close()
	s, err := openStore(r.conf.Root)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Put(kindFinished, runtimeA+"/old", object(moduleData("old", "restart", "never"))); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	r.set(func(b *bus) { b.log = nil })
	r.open()
	r.states(runtimeA, "1", map[string]string{"old": "finished"})
	if n := r.a.count(true, wire.Create); n != 1 {
		t.Errorf("created %d times, want once", n)
	}
}
