package manager

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// TestTheCulpritIsFound: of any number of modules, the one that makes the runtime die is blamed, no other one is, and the
// number of losses grows with the logarithm of the number of modules.
func TestTheCulpritIsFound(t *testing.T) {
	for n := 1; n <= channel.MaxModules; n++ {
		var all []string
		for i := range n {
			all = append(all, fmt.Sprint("m", i))
		}
		for _, culprit := range []string{all[0], all[n/2], all[n-1]} {
			s, blamed, losses := newSuspects(), "", 0
			for blamed == "" {
				launched := slices.DeleteFunc(slices.Clone(all), s.is)
				for {
					for _, uuid := range launched {
						s.fresh[uuid] = true
					}
					if slices.Contains(launched, culprit) {
						break
					}
					for _, uuid := range launched {
						s.acquit(uuid)
					}
					launched = s.next(slices.DeleteFunc(slices.Clone(all), func(uuid string) bool { return !s.is(uuid) }))
				}
				losses++
				blamed = s.lost(slices.Clone(all))
			}
			if most := max(blameLosses, suspectLosses+bits.Len(uint(n))+1); blamed != culprit || losses > most {
				t.Fatalf("of %d modules %s is blamed after %d losses, want %s after at most %d", n, blamed, losses, culprit, most)
			}
			if left := slices.DeleteFunc(slices.Clone(all), func(uuid string) bool { return !s.is(uuid) }); !slices.Equal(left, []string{culprit}) {
				t.Fatalf("of %d modules %q are suspects after %s is blamed", n, left, culprit)
			}
		}
	}
}

// TestInnocentWhileRunning: a loss counts only against modules on probation, and a module that has passed it is acquitted.
func TestInnocentWhileRunning(t *testing.T) {
	s := newSuspects()
	for range 2 * blameLosses {
		s.fresh["a"], s.fresh["b"] = true, true
		s.acquit("a")
		s.acquit("b")
		if blamed := s.lost([]string{"a", "b"}); blamed != "" || s.is("a") || s.is("b") {
			t.Fatalf("%q is blamed, the losses are %v", blamed, s.losses)
		}
	}
	for i := range 3 * maxSuspects {
		uuid := fmt.Sprint(i)
		s.fresh[uuid] = true
		s.lost([]string{uuid})
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
	if got := dataOf(t, m)["status"].(map[string]any); got["code"] != 137.0 || !strings.Contains(got["message"].(string), "the runtime a died") {
		t.Errorf("the exit has the status %v, want code 137 and the runtime", got)
	}
	r.states(runtimeA, "", map[string]string{"first": "running", "last": "running"})
	if n := r.count(isCrash("first")) + r.count(isCrash("last")); n != 0 {
		t.Errorf("%d innocent modules are blamed, want 0", n)
	}
}

// TestRestartOfAKiller: its policy decides whether it is created again; one more loss is then enough.
func TestRestartOfAKiller(t *testing.T) {
	r, _ := crashRig(t, 200*time.Millisecond)
	r.desire(runtimeA, 1, moduleData("killer", "restart", "on-failure"))
	r.find(t, topics.ControlOf(runtimeA), 3, isCrash("killer"))
	if n := r.count(isExit("killer")) - r.count(isCrash("killer")); n > blameLosses-1 {
		t.Errorf("%d losses before the first blame and after it, want at most %d", n, blameLosses-1)
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
