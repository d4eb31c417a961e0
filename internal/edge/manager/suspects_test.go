package manager

import (
	"context"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// testModules returns n modules that are in their runtime.
func testModules(n int) (all []*module) {
	for i := range n {
		all = append(all, &module{uuid: fmt.Sprint("m", i), state: running})
	}
	return all
}

// TestTheCulpritIsFound: of any number of modules, the one that makes the runtime die is blamed, no other one is, and the
// number of losses grows with the logarithm of the number of modules.
func TestTheCulpritIsFound(t *testing.T) {
	for n := 1; n <= channel.MaxModules; n++ {
		all := testModules(n)
		byUUID := map[string]*module{}
		for _, mod := range all {
			byUUID[mod.uuid] = mod
		}
		for _, culprit := range []*module{all[0], all[n/2], all[n-1]} {
			s, losses := newSuspects(), 0
			heldBack := func() (held []string) {
				for _, mod := range all {
					if s.is(mod.uuid) {
						held = append(held, mod.uuid)
					}
				}
				return held
			}
			for s.accused == nil {
				launched := slices.DeleteFunc(slices.Clone(all), func(mod *module) bool { return s.is(mod.uuid) })
				for {
					for _, mod := range launched {
						s.fresh[mod.uuid] = mod
					}
					if slices.Contains(launched, culprit) {
						break
					}
					for _, mod := range launched {
						s.acquit(mod.uuid)
					}
					launched = nil
					for _, uuid := range s.next(heldBack()) {
						launched = append(launched, byUUID[uuid])
					}
				}
				losses++
				if s.lost(slices.Clone(all)) {
					t.Fatalf("of %d modules, with culprit %s, the runtime is at fault", n, culprit.uuid)
				}
			}
			if most, blamed := max(blameLosses, suspectLosses+bits.Len(uint(n))+1), s.convict(); blamed != culprit || losses > most {
				t.Fatalf("of %d modules %s is blamed after %d losses, want %s after at most %d", n, blamed.uuid, losses, culprit.uuid, most)
			}
			if left := heldBack(); !slices.Equal(left, []string{culprit.uuid}) {
				t.Fatalf("of %d modules %q are suspects after %s is blamed", n, left, culprit.uuid)
			}
		}
	}
}

// TestInnocentWhileRunning: a loss counts only against modules on probation, and a module that has passed it is acquitted.
func TestInnocentWhileRunning(t *testing.T) {
	s, all := newSuspects(), testModules(2)
	for range 2 * blameLosses {
		for _, mod := range all {
			s.fresh[mod.uuid] = mod
			s.acquit(mod.uuid)
		}
		if s.lost(slices.Clone(all)); s.accused != nil || len(s.losses) > 0 {
			t.Fatalf("%v is accused, the losses are %v", s.accused, s.losses)
		}
	}
	for _, mod := range testModules(3 * maxSuspects) {
		s.fresh[mod.uuid] = mod
		s.lost([]*module{mod})
	}
	if len(s.losses) > maxSuspects+1 {
		t.Errorf("%d losses are remembered, want at most %d", len(s.losses), maxSuspects+1)
	}
}

// crashRig is a rig whose first runtime dies whenever the module "killer" is created.
func crashRig(t *testing.T, probation time.Duration) (*rig, *own) {
	r, o := ownRig(t, func(c *Config) { c.Probation = probation })
	o.create = func(_ int, data wire.ModuleData) error {
		if data.UUID() == "killer" {
			o.kill()
		}
		return nil
	}
	return r, o
}

// hasReason matches an exited message of the module with this reason.
func hasReason(uuid, reason string) func(mqtt.Message) bool {
	return func(m mqtt.Message) bool {
		return isExit(uuid)(m) && strings.Contains(string(m.Payload), `"`+reason+`"`)
	}
}

func isCrash(uuid string) func(mqtt.Message) bool { return hasReason(uuid, reasonCrash) }

// TestAModuleThatKillsItsRuntime: it ends with a reason that says so; the other modules of the runtime run.
func TestAModuleThatKillsItsRuntime(t *testing.T) {
	r, _ := crashRig(t, 200*time.Millisecond)
	for _, uuid := range []string{"first", "killer", "last"} {
		r.order(runtimeA, wire.ActionCreate, moduleData(uuid))
	}
	m := r.find(t, topics.ControlOf(runtimeA), 1, isCrash("killer"))
	if got := dataOf(t, m)["status"].(map[string]any); got["code"] != 137.0 ||
		!strings.Contains(got["message"].(string), "the runtime a died") {
		t.Errorf("the exit has the status %v, want code 137 and the runtime", got)
	}
	r.states(runtimeA, "", map[string]string{"first": "running", "last": "running"})
	if n := r.count(isCrash("first")) + r.count(isCrash("last")); n != 0 {
		t.Errorf("%d innocent modules are blamed, want 0", n)
	}
}

// eventually waits until the condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := poll(ctx, condition); err != nil {
		t.Fatalf("waiting until %s: %v", what, err)
	}
}

// deathsBefore returns how often the runtime died with the module before each of the module's ends that blame it.
func (r *rig) deathsBefore(uuid string) (deaths []int) {
	r.bus.mu.Lock()
	defer r.bus.mu.Unlock()
	n := 0
	for _, m := range r.bus.log {
		switch {
		case isCrash(uuid)(m):
			deaths, n = append(deaths, n), 0
		case hasReason(uuid, "runtime-lost")(m):
			n++
		}
	}
	return deaths
}

// TestRestartOfAKiller: its policy decides whether it is created again; one more loss is then enough, also while other
// modules run.
func TestRestartOfAKiller(t *testing.T) {
	r, _ := crashRig(t, 100*time.Millisecond)
	r.desire(runtimeA, 1, moduleData("first"), moduleData("killer", "restart", "on-failure"), moduleData("last"))
	r.find(t, topics.ControlOf(runtimeA), 4, isCrash("killer"))
	if got := r.deathsBefore("killer"); got[0] > blameLosses+1 || !slices.Equal(got[1:4], []int{1, 1, 1}) {
		t.Errorf("%d deaths before each blame, want at most %d, then 1 each time", got, blameLosses+1)
	}
	r.desire(runtimeA, 2, moduleData("killer", "restart", "never"))
	got := r.reported(runtimeA, func(got reported) bool {
		return string(got.Generation) == "2" && got.module("killer").State == reportedFinished
	})
	if mod := got.module("killer"); mod.Reason != reasonCrash {
		t.Errorf("the report is %+v, want the reason %s", mod, reasonCrash)
	}
}

// TestDeleteWhileHeld: a module that waits for the trial of others can be deleted.
func TestDeleteWhileHeld(t *testing.T) {
	r, o := crashRig(t, time.Hour)
	r.m.hosts[0].mu.Lock()
	r.m.hosts[0].suspects.losses["tried"], r.m.hosts[0].suspects.losses["held"] = suspectLosses, suspectLosses
	r.m.hosts[0].mu.Unlock()
	r.order(runtimeA, wire.ActionCreate, moduleData("tried"))
	r.order(runtimeA, wire.ActionCreate, moduleData("held"))
	r.reported(runtimeA, func(got reported) bool {
		return strings.Contains(got.module("held").Error, "held back") && got.module("tried").State == "running"
	})
	r.order(runtimeA, wire.ActionDelete, moduleData("held"))
	if got := r.exitedOf(runtimeA, "held", 1)["status"].(map[string]any); got["reason"] != "killed" {
		t.Errorf("the exit has the status %v, want reason killed", got)
	}
	o.kill()
	r.exitedOf(runtimeA, "tried", 1)
}

// TestTwoKillersThatRestart: the restarts of one do not prevent that the other one is found.
func TestTwoKillersThatRestart(t *testing.T) {
	r, o := ownRig(t, func(c *Config) { c.Probation = 50 * time.Millisecond })
	var once sync.Map // of each run: both killers may be in it
	o.create = func(_ int, data wire.ModuleData) error {
		if strings.HasPrefix(data.UUID(), "killer") {
			o.fake.mu.Lock()
			run := o.starts
			o.fake.mu.Unlock()
			if _, dead := once.LoadOrStore(run, true); !dead {
				o.kill()
			}
		}
		return nil
	}
	r.desire(runtimeA, 1, moduleData("first"), moduleData("killer1", "restart", "on-failure"), moduleData("killer2", "restart", "on-failure"),
		moduleData("last"))
	r.find(t, topics.ControlOf(runtimeA), 2, isCrash("killer1"))
	r.find(t, topics.ControlOf(runtimeA), 2, isCrash("killer2"))
	if n := r.count(isCrash("first")) + r.count(isCrash("last")); n != 0 {
		t.Errorf("%d innocent modules are blamed, want 0", n)
	}
}

// TestARuntimeThatDiesByItself: none of its modules is blamed.
func TestARuntimeThatDiesByItself(t *testing.T) {
	var healthy atomic.Bool
	r := newRig(t, func(c *Config) {
		c.Probation = 200 * time.Millisecond
		f := c.Runtimes[0].(*fake)
		f.start = func() error {
			time.AfterFunc(50*time.Millisecond, func() {
				if !healthy.Load() {
					f.kill()
				}
			})
			return nil
		}
	})
	r.desire(runtimeA, 1, moduleData("one", "restart", "never"), moduleData("two", "restart", "never"))
	r.find(t, topics.ControlOf(runtimeA), 4*blameLosses, hasReason("one", "runtime-lost"))
	healthy.Store(true)
	r.states(runtimeA, "1", map[string]string{"one": "running", "two": "running"})
	if n := r.count(isCrash("one")) + r.count(isCrash("two")); n != 0 {
		t.Errorf("%d modules are blamed, want 0", n)
	}
	if raw, err := os.ReadFile(r.log); err != nil || !strings.Contains(string(raw), "no module is blamed") {
		t.Errorf("the log, %v, does not say that no module is blamed", err)
	}
}

// TestProbationNeedsARun: a module that cannot be created yet is neither acquitted, nor do suspects wait for it.
func TestProbationNeedsARun(t *testing.T) {
	const probation = 100 * time.Millisecond
	r, o := ownRig(t, func(c *Config) { c.Probation = probation })
	losses := func(uuid string) int {
		r.m.hosts[0].mu.Lock()
		defer r.m.hosts[0].mu.Unlock()
		return r.m.hosts[0].suspects.losses[uuid]
	}
	var ready atomic.Bool
	o.create = func(_ int, data wire.ModuleData) error {
		if data.UUID() == "late" && !ready.Load() {
			return fmt.Errorf("not now: %w", errdefs.ErrUnavailable)
		}
		return nil
	}
	r.m.hosts[0].mu.Lock()
	r.m.hosts[0].suspects.losses["late"], r.m.hosts[0].suspects.losses["other"] = suspectLosses, suspectLosses
	r.m.hosts[0].mu.Unlock()
	r.order(runtimeA, wire.ActionCreate, moduleData("late"))
	r.order(runtimeA, wire.ActionCreate, moduleData("other"))
	r.reported(runtimeA, func(got reported) bool { return got.module("other").State == "running" })
	eventually(t, "other is acquitted", func() bool { return losses("other") == 0 })
	r.m.hosts[0].mu.Lock()
	r.m.hosts[0].suspects.losses["third"] = suspectLosses
	r.m.hosts[0].mu.Unlock()
	r.order(runtimeA, wire.ActionCreate, moduleData("third"))
	eventually(t, "another probation is over", func() bool { return losses("third") == 0 })
	if got := losses("late"); got != suspectLosses {
		t.Errorf("a module that never ran has %d losses, want still %d", got, suspectLosses)
	}
	ready.Store(true)
	eventually(t, "late is acquitted after its run", func() bool { return losses("late") == 0 })
}

// TestLogOfAKiller: the log of the run in which its runtime died is kept when the module is blamed.
func TestLogOfAKiller(t *testing.T) {
	r, o := crashRig(t, 100*time.Millisecond)
	o.create = func(index int, _ wire.ModuleData) error {
		o.tell(t, true, index, wire.ModuleLog, "last words")
		o.kill()
		return nil
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("killer"))
	r.find(t, topics.ControlOf(runtimeA), 1, isCrash("killer"))
	if l := r.logOf("killer"); l.Log != "last words" || !strings.Contains(string(l.Exit), reasonCrash) {
		t.Errorf("the log of the killer is %+v, want its line and the reason %s", l, reasonCrash)
	}
}
