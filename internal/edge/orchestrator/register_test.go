package orchestrator

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/failpoint"
)

const (
	managerWill = `{"object_id":"w","action":"delete","type":"arts_req","data":{"type":"manager","uuid":"m","name":"node"}}`
	lostStatus  = `{"code":137,"reason":"runtime-lost"}`
)

func beatOf(uuid string) string {
	return envelope("update", fmt.Sprintf(`{"type":"runtime","uuid":%q,"name":"x","children":[0]}`, uuid))
}

func TestRegistrationIsAnsweredInFull(t *testing.T) {
	b := open(t)
	b.say("realm/proc/reg/m", envelope("create", `{"type":"manager","uuid":"m","name":"node"}`))
	b.say("realm/proc/reg/r",
		envelope("create", `{"type":"runtime","uuid":"r","name":"min","runtime_type":"linux/minimal","apis":["wasm"],"parent":"m","mine":{"a":[1]}}`))
	all := b.hears("reg/m create", "reg/r create")
	if got := fmt.Sprint(all[0].ObjectID, all[0].Type,
		all[0].Data); got != "id-createarts_respmap[details:map[ka_interval_sec:60 name:node status:A uuid:m] result:ok]" {
		t.Errorf("the registration is answered with %s, want all details", got)
	}
	want := "map[details:map[aot_target:map[] apis:[wasm] ka_interval_sec:60 max_nmodules:100 metadata:<nil> mine:map[a:[1]] name:min page_size:65536 parent:m platform:<nil> runtime_type:linux/minimal status:A uuid:r] result:ok]"
	if got := fmt.Sprint(all[1].Data); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

func TestBadRegistrations(t *testing.T) {
	b := open(t)
	b.node(1, "r1")
	for why, c := range map[string][2]string{
		"unknown parent":           {"r2", `{"type":"runtime","uuid":"r2","parent":"nobody"}`},
		"want manager or runtime":  {"r2", `{"type":"module","uuid":"r2"}`},
		"on the topic of":          {"r2", `{"type":"runtime","uuid":"other"}`},
		"with the uuid \"\"":       {"r2", `{"type":"runtime"}`},
		`"max_nmodules" is not`:    {"r2", `{"type":"runtime","uuid":"r2","max_nmodules":-1}`},
		`"ka_interval_sec" is not`: {"r2", `{"type":"runtime","uuid":"r2","ka_interval_sec":"often"}`},
		`"apis" is not`:            {"r2", `{"type":"runtime","uuid":"r2","apis":"wasm"}`},
		`"name" is not`:            {"r2", `{"type":"runtime","uuid":"r2","name":[]}`},
		"no / + # $":               {"$x", `{"type":"runtime","uuid":"$x"}`},
		"JSON object":              {"r2", `null`},
	} {
		b.say("realm/proc/reg/"+c[0], envelope("create", c[1]))
		if got := b.refusal(); !strings.Contains(got, why) {
			t.Errorf("%s is answered %q, want %q", c[1], got, why)
		}
	}
	b.say("realm/proc/reg/gone", envelope("delete", `{"type":"runtime","uuid":"gone"}`))
	b.hears() // nobody's last will
	if n := len(b.state.list(Runtime)); n != 1 {
		t.Errorf("%d runtimes, want 1", n)
	}
}

func TestManagerIsLostAndComesBack(t *testing.T) {
	b := open(t)
	b.node(3, "r1", "r2")
	b.create("a", "r1", "")
	b.create("b", "r1", "")
	b.create("c", "r2", "")
	b.create("gone", "r2", "")
	b.delete("b")
	first := b.hear()[0]
	b.say("realm/proc/reg/m", managerWill)
	b.hears("notif exited b") // what was exiting is gone with its runtime
	b.wantStates("a:K b:D c:K gone:K")
	for _, r := range b.state.list(Runtime) {
		if r.Status != Dead {
			t.Errorf("the runtime %s is %s, want it dead", r.UUID, r.Status)
		}
	}
	b.delete("gone")
	b.hears("notif exited gone")
	b.say("realm/proc/reg/m", envelope("create", `{"type":"manager","uuid":"m","name":"node"}`))
	b.hears("reg/m create")
	b.register("r1", 3)
	again := b.hears("reg/r1 create", "control/r1 create a", "control/r1 delete b")
	if again[1].ObjectID != first.ObjectID {
		t.Error("a module that may have gone on is ordered as another one")
	}
	b.register("r2", 3)
	b.hears("reg/r2 create", "control/r2 create c", "control/r2 delete gone")
	b.wantStates("a:A b:D c:A gone:D")
	b.register("r2", 3) // a mere reconnect
	b.hears("reg/r2 create")
}

func TestRuntimeIsLostUnderItsManager(t *testing.T) {
	b := open(t)
	b.node(2, "r1")
	b.create("a", "r1", "")
	b.create("b", "r1", `,"restart":"on-failure"`)
	b.exited("r1", "b", `{"code":1,"reason":"exited"}`)
	b.hear()
	b.exited("r1", "a", lostStatus)
	b.hears("notif exited a")
	b.say("realm/proc/reg/r1", envelope("delete", `{"type":"runtime","uuid":"r1"}`))
	b.wantStates("a:K b:K")
	b.clock.pass(time.Minute)
	b.checkDeadlines(t.Context()) // b's back-off ends while nobody could run it
	b.hears()
	b.wantStates("a:K b:K")
	b.register("r1", 1) // it takes fewer now
	b.hears("reg/r1 create", "control/r1 create a")
	b.wantStates("a:A b:Q")
}

func TestSilenceMeansDeath(t *testing.T) {
	b := open(t, func(c *Config) { c.KeepaliveInterval = 10 * time.Second })
	b.node(1, "r1", "quiet")
	b.create("a", "r1", "")
	b.create("q", "quiet", "")
	b.say("realm/proc/keepalive/r1", beatOf("r1"))
	b.hear()
	b.clock.pass(29 * time.Second)
	b.checkDeadlines(t.Context())
	b.say("realm/proc/keepalive/r1", beatOf("r1"))
	b.clock.pass(29 * time.Second)
	b.checkDeadlines(t.Context())
	b.wantStates("a:A q:A") // one that never beat has promised nothing; its manager's last will speaks for it
	b.clock.pass(2 * time.Second)
	b.checkDeadlines(t.Context())
	b.wantStates("a:K q:A")
	b.hears()
	b.say("realm/proc/keepalive/r1", beatOf("r1")) // it was only silent: the module runs
	b.hears()
	b.wantStates("a:A q:A")
}

func TestPromisedKeepalives(t *testing.T) {
	b := open(t)
	b.node(1)
	b.say("realm/proc/reg/r1", envelope("create", `{"type":"runtime","uuid":"r1","parent":"m","ka_interval_sec":5}`))
	b.say("realm/proc/reg/alone", envelope("create", `{"type":"runtime","uuid":"alone"}`))
	if all := b.hears("reg/r1 create", "reg/alone create"); fmt.Sprint(all[0].Data["details"].(map[string]any)["ka_interval_sec"]) != "5" {
		t.Errorf("the answers are %v, want the promised interval of 5 s", all)
	}
	b.clock.pass(16 * time.Second)
	b.checkDeadlines(t.Context())
	if s := b.state.get(key{Runtime, "r1"}).Status; s != Dead {
		t.Errorf("after 16 s of 5 s intervals it is %s", s)
	}
	b.clock.pass(165 * time.Second)
	b.checkDeadlines(t.Context())
	if s := b.state.get(key{Runtime, "alone"}).Status; s != Dead {
		t.Errorf("after three minutes the one without a manager is %s", s)
	}
}

func TestNobodyDiesWhileTheBrokerIsAway(t *testing.T) {
	b := open(t)
	b.node(1, "r1")
	b.say("realm/proc/keepalive/r1", beatOf("r1"))
	b.link.set(func(l *link) { l.away = true })
	b.clock.pass(time.Hour)
	b.checkDeadlines(t.Context())
	b.link.set(func(l *link) { l.away = false })
	b.clock.pass(time.Minute)
	b.checkDeadlines(t.Context())
	if s := b.state.get(key{Runtime, "r1"}).Status; s != Alive {
		t.Fatalf("it is %s: its keepalives could not be heard", s)
	}
	b.clock.pass(3 * time.Minute)
	b.checkDeadlines(t.Context())
	if s := b.state.get(key{Runtime, "r1"}).Status; s != Dead {
		t.Errorf("it is %s", s)
	}
}

func TestBadKeepalives(t *testing.T) {
	b := open(t)
	b.node(1, "r1")
	for _, c := range [][2]string{
		{"r1", beatOf("other")}, {"nobody", beatOf("nobody")}, {"r1", envelope("create", `{}`)}, {"r1", envelope("update", `[]`)}, {"r1", ``},
	} {
		b.say("realm/proc/keepalive/"+c[0], c[1])
		b.refusal()
	}
	b.say("realm/proc/keepalive/m", envelope("update", `{"type":"manager","uuid":"m"}`))
	b.hears()
}

func TestRecordIsServedAfterARestart(t *testing.T) {
	b := open(t)
	b.node(1, "r1")
	b.create("a", "r1", "")
	b.create("b", "r1", "")
	b.hear()
	b.settleOrders(t.Context(), false)
	b.end()
	b.start()
	b.wantStates("a:A b:Q")
	b.checkDeadlines(t.Context())
	b.hears() // nothing is created twice
	b.exited("r1", "a", `"exited"`)
	b.hears("notif exited a", "control/r1 create b")
}

func TestUntoldOrdersAreToldAfterARestart(t *testing.T) {
	b := open(t)
	b.node(2, "r1")
	b.link.set(func(l *link) { l.stats.Queued = 1 }) // the broker has not taken them
	b.create("a", "r1", "")
	b.create("b", "r1", "")
	b.delete("b")
	before := b.hears("control/r1 create a", "control/r1 create b", "control/r1 delete b")
	b.settleOrders(t.Context(), false)
	b.end()
	b.start()
	after := b.hears("control/r1 create a", "control/r1 delete b")
	if before[0].ObjectID != after[0].ObjectID || before[2].ObjectID != after[1].ObjectID {
		t.Error("repeated orders have other ids")
	}
	b.settleOrders(t.Context(), false)
	b.end()
	b.start()
	b.hears()
}

func TestDroppedOrdersAreRepeated(t *testing.T) {
	b := open(t)
	b.node(3, "r1")
	b.link.set(func(l *link) { l.stats.Queued = 1 })
	b.create("a", "r1", "")
	b.hears("control/r1 create a")
	b.link.set(func(l *link) { l.stats.Dropped, l.stats.Queued = 1, 0 })
	b.settleOrders(t.Context(), false)
	b.hears("control/r1 create a")
	b.link.set(func(l *link) { l.fails = errors.New("no room") })
	b.create("b", "r1", "")
	b.link.set(func(l *link) { l.fails = nil })
	b.settleOrders(t.Context(), false)
	if n := len(b.hear()); n != 2 {
		t.Errorf("%d orders are repeated, want both", n)
	}
	b.settleOrders(t.Context(), false)
	b.settleOrders(t.Context(), false)
	b.hears()
}

// TestN5DiskIsFull: a transition that cannot be written changes nothing, and is answered with an error.
func TestN5DiskIsFull(t *testing.T) {
	failpoint.Needed(t)
	b := open(t)
	b.node(1, "r1")
	if err := failpoint.Arm("orchestrator.transition.decided", "1*error(no space left on device)"); err != nil {
		t.Fatal(err)
	}
	b.create("a", "r1", "")
	if why := b.refusal(); !strings.Contains(why, "no space left") {
		t.Errorf("answered %q, want %q in it", why, "no space left")
	}
	b.wantStates("")
	b.create("a", "r1", "")
	b.hears("control/r1 create a")
}

func TestMistakesOfItsOwnEndNothing(t *testing.T) {
	b := open(t)
	b.node(1, "r1")
	b.link.set(func(l *link) { l.panics = true })
	b.register("r1", 1)
	if why := b.refusal(); !strings.Contains(why, "defect") {
		t.Errorf("answered %q, want %q in it", why, "defect")
	}
	b.create("a", "r1", "")
	b.hears("control/r1 create a")
}

func TestRecordIsBounded(t *testing.T) {
	b := open(t, func(c *Config) { c.KeepDead = 3 })
	b.node(1, "r1")
	for i := range 6 {
		m := fmt.Sprint("m", i)
		b.create(m, "r1", "")
		b.exited("r1", m, `"exited"`)
	}
	b.settleOrders(t.Context(), false)
	b.checkDeadlines(t.Context())
	b.wantStates("m3:D m4:D m5:D")
}
