package manager

import (
	"context"
	"errors"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/failpoint"
)

// quick makes registrations fail fast.
func quick(c *Config) { c.RegisterTimeout = 20 * time.Millisecond }

// TestRegistrationIsNotGivenUp: a registration is retried without an answer and after a wrong one; runtimes register
// after their manager.
func TestRegistrationIsNotGivenUp(t *testing.T) {
	r := newRig(t, quick, func(b *bus) { b.silent = true })
	third := r.find(t, topics.Reg(managerID), 3, isAction(wire.ActionCreate))
	if n := r.count(isRegistration(runtimeA)); n != 0 {
		t.Errorf("a runtime registers %d times before its manager has, want 0", n)
	}
	if third.QoS != 2 {
		t.Errorf("a registration has QoS %d", third.QoS)
	}
	r.set(func(b *bus) { b.silent, b.refuse = false, "error" })
	r.find(t, topics.Reg(managerID), 5, isAction(wire.ActionCreate))
	r.publish(topics.Reg(managerID), false, []byte("no json"))
	r.publish(topics.Reg(managerID), false, []byte(`{"object_id": "another's", "type": "arts_resp", "data": {"result": "ok"}}`))
	r.publish(topics.Reg(managerID), false, []byte(`{"object_id": "another's", "type": "arts_resp", "data": "text"}`))
	if r.m.registered.Load() {
		t.Error("registered by another's answer")
	}
	r.set(func(b *bus) { b.refuse = "" })
	r.find(t, topics.Reg(runtimeA), 1, isAction(wire.ActionCreate))
	r.find(t, topics.Reg(runtimeB), 1, isAction(wire.ActionCreate))
}

// TestOrchestratorComesLater: an orchestrator that starts later soon gets the pending registration.
func TestOrchestratorComesLater(t *testing.T) {
	r := newRig(t, func(c *Config) { c.RegisterTimeout = patience }, func(b *bus) { b.silent = true })
	first := r.find(t, topics.Reg(managerID), 1, isAction(wire.ActionCreate))
	r.set(func(b *bus) { b.silent = false })
	second := r.find(t, topics.Reg(managerID), 2, isAction(wire.ActionCreate))
	if string(first.Payload) != string(second.Payload) {
		t.Errorf("sent %s, then %s", first.Payload, second.Payload)
	}
	r.find(t, topics.Reg(runtimeA), 1, isAction(wire.ActionCreate))
}

// typeOf returns the type of a control message.
func typeOf(t testing.TB, m mqtt.Message) string {
	t.Helper()
	e, err := wire.ParseEnvelope(m.Payload)
	if err != nil {
		t.Fatal(err)
	}
	return e.Type
}

// TestLaterOrchestrator: once an orchestrator of later peers has answered, the manager speaks as it does. Such an
// orchestrator refuses all else, also the ends of modules.
func TestLaterOrchestrator(t *testing.T) {
	r := newRig(t, nil, func(b *bus) { b.later = true })
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.order(runtimeA, wire.ActionCreate, moduleData("n"))
	r.a.find(t, true, 1, wire.Create, 1)
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 4, "reason": "exited"}}`)
	r.a.tell(t, true, 0, wire.Keepalive, `{}`)
	for topic, action := range map[string]string{topics.ControlOf(runtimeA): wire.ActionExited,
		topics.Keepalive(runtimeA): wire.ActionUpdate} {
		if got := typeOf(t, r.find(t, topic, 1, isAction(action))); got != wire.RequestLater {
			t.Errorf("%s has the type %q, want %q", action, got, wire.RequestLater)
		}
	}
	r.order(runtimeA, wire.ActionDelete, map[string]any{"uuid": "n"}) // without its type, as some peers send it
	r.a.find(t, true, 1, wire.Delete, 1)
	r.close()
	r.open()
	if got := typeOf(t, mqtt.Message{Payload: r.client().config.Will.Payload}); got != wire.RequestLater {
		t.Errorf("the next daemon's will has the type %q, want %q", got, wire.RequestLater)
	}
}

// TestOrchestratorOfTheSeedAgain: the manager follows an orchestrator that takes the place of a later one.
func TestOrchestratorOfTheSeedAgain(t *testing.T) {
	r := newRig(t, nil, func(b *bus) { b.later = true })
	r.set(func(b *bus) { b.later = false })
	r.client().disconnect()
	r.client().connect()
	r.find(t, topics.Reg(runtimeA), 1, func(m mqtt.Message) bool { return typeOf(t, m) == wire.Response })
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 4, "reason": "exited"}}`)
	if got := typeOf(t, r.find(t, topics.ControlOf(runtimeA), 1, isExit("m"))); got != wire.Request {
		t.Errorf("to the seed's orchestrator: type %q, want %q", got, wire.Request)
	}
}

// TestExitForAnUnknownOrchestrator: exits that the manager has sent before it knew the orchestrator's dialect are sent
// again in that dialect, before any runtime registers.
func TestExitForAnUnknownOrchestrator(t *testing.T) {
	r := exitWhileAway(t)
	r.m.hosts[0].wait(t.Context(), func() bool { return len(r.m.hosts[0].byUUID) == 0 })
	r.set(func(b *bus) { b.later = true })
	r.client().connect()
	r.find(t, topics.Reg(runtimeA), 1, func(m mqtt.Message) bool { return typeOf(t, m) == wire.ResponseLater })
	last := ""
	r.first(func(m mqtt.Message) bool {
		if isExit("m")(m) {
			last = typeOf(t, m)
		}
		return m.Topic == topics.Reg(runtimeA) && typeOf(t, m) == wire.ResponseLater
	})
	if last != wire.RequestLater {
		t.Errorf("before the runtime registered, the last exit had the type %q, want %q", last, wire.RequestLater)
	}
	r.m.exits.waitEmpty(t)
}

func isRegistration(uuid string) func(mqtt.Message) bool {
	return func(m mqtt.Message) bool {
		return m.Topic == topics.Reg(uuid) && isAction(wire.ActionCreate)(m)
	}
}

func (b *bus) set(f func(*bus)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b)
}

// TestReconnect: each connection repeats all registrations, the manager's first; modules keep running.
func TestReconnect(t *testing.T) {
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 1)
	for n := 2; n < 4; n++ {
		r.client().disconnect()
		r.client().connect()
		r.find(t, topics.Reg(managerID), n, isAction(wire.ActionCreate))
		r.find(t, topics.Reg(runtimeA), n, isAction(wire.ActionCreate))
		r.find(t, topics.Reg(runtimeB), n, isAction(wire.ActionCreate))
		r.order(runtimeA, wire.ActionCreate, moduleData("m")) // the orchestrator took it for lost
		h := r.m.hosts[0]
		if err := poll(t.Context(), func() bool { h.mu.Lock(); defer h.mu.Unlock(); return !h.byUUID["m"].repeatable }); err != nil {
			t.Fatal(err)
		}
	}
	// The will's words come again, before the registration: a broker that died too has said nothing.
	for i, want := range []string{wire.ActionCreate, wire.ActionDelete, wire.ActionDelete, wire.ActionCreate, wire.ActionDelete,
		wire.ActionDelete, wire.ActionCreate} {
		m := r.find(t, topics.Reg(managerID), i+1,
			func(m mqtt.Message) bool { return isAction(wire.ActionCreate)(m) || isAction(wire.ActionDelete)(m) })
		if !isAction(want)(m) {
			t.Errorf("message %d of the manager is %s, want %s", i+1, m.Payload, want)
		}
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("other"))
	r.a.find(t, true, 1, wire.Create, 1)
	if n := r.count(isError); n != 0 {
		t.Errorf("%d errors, want 0", n)
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.errorWith(1) // that is one too many
	if n := r.a.count(true, wire.Create); n != 2 {
		t.Errorf("the modules were created %d times, want 2", n)
	}
}

// TestNoBrokerAtTheStart: runtimes and recorded modules start without a broker (fault E2).
func TestNoBrokerAtTheStart(t *testing.T) {
	r := newRig(t, nil, func(b *bus) { b.away = true })
	if !r.m.hosts[0].wait(t.Context(), func() bool { return r.m.hosts[0].up }) {
		t.Fatal("the runtime does not start")
	}
	r.client().connect()
	r.find(t, topics.Reg(runtimeA), 1, isAction(wire.ActionCreate))
}

// TestRuntimeDoesNotStart is fault E3: the start is retried with a backoff, and the other runtime is not affected.
func TestRuntimeDoesNotStart(t *testing.T) {
	var tries atomic.Int32
	r := newRig(t, func(c *Config) {
		c.Runtimes[0].(*fake).start = func() error {
			if tries.Add(1) < 4 {
				return errors.New("it does not connect")
			}
			return nil
		}
	})
	r.order(runtimeB, wire.ActionCreate, moduleData("m"))
	r.b.find(t, true, 0, wire.Create, 1)
	if n := tries.Load(); n != 4 {
		t.Errorf("started %d times, want 4", n)
	}
}

// TestModuleForARuntimeThatIsDown: the module waits for its runtime, or is deleted without it.
func TestModuleForARuntimeThatIsDown(t *testing.T) {
	up := make(chan struct{})
	r := newRig(t, func(c *Config) {
		c.Runtimes[0].(*fake).start = func() error {
			select {
			case <-up:
				return nil
			default:
				return errors.New("not yet")
			}
		}
	}, func(b *bus) { b.away = true })
	r.client().connect()
	r.find(t, topics.Reg(runtimeB), 1, isAction(wire.ActionCreate))
	r.order(runtimeA, wire.ActionCreate, moduleData("waits"))
	r.order(runtimeA, wire.ActionCreate, moduleData("goes"))
	r.order(runtimeA, wire.ActionDelete, moduleData("goes"))
	if got := r.exitedOf(runtimeA, "goes", 1); got["status"].(map[string]any)["reason"] != "killed" {
		t.Errorf("the exit has the status %v, want reason killed", got)
	}
	close(up)
	r.find(t, topics.Reg(runtimeA), 1, isAction(wire.ActionCreate))
	r.a.find(t, true, 0, wire.Create, 1)
	if n := r.a.count(true, wire.Create); n != 1 {
		t.Errorf("%d modules were created, want 1", n)
	}
}

// TestRuntimeIsLost is fault E3: the exits of its modules are reported; the runtime starts, registers and gets its
// modules again with the same data (the public peers' argument lists grow). A module that was being deleted is not
// created again.
func TestRuntimeIsLost(t *testing.T) {
	r := newRig(t, nil)
	args := []any{"hello", "x"}
	r.order(runtimeA, wire.ActionCreate, moduleData("stays", "args", args))
	r.order(runtimeA, wire.ActionCreate, moduleData("goes"))
	first := r.a.find(t, true, 0, wire.Create, 1)
	r.a.find(t, true, 1, wire.Create, 1)
	r.order(runtimeA, wire.ActionDelete, moduleData("goes"))
	r.a.find(t, true, 1, wire.Delete, 1)
	r.a.open(t, 0, 0, channel.Read, "in")
	for n := 2; n < 4; n++ {
		r.a.kill()
		if got := r.exitedOf(runtimeA, "stays", n-1)["status"].(map[string]any); got["reason"] != "runtime-lost" || got["code"] != 137.0 {
			t.Errorf("the exit has the status %v, want reason runtime-lost and code 137", got)
		}
		r.find(t, topics.Reg(runtimeA), n-1, isAction(wire.ActionDelete))
		r.find(t, topics.Reg(runtimeA), n, isAction(wire.ActionCreate))
		if again := r.a.find(t, true, 0, wire.Create, n); !reflect.DeepEqual(again, first) {
			t.Errorf("created again with %s, before with %s", again.Payload, first.Payload)
		}
	}
	if got := r.exitedOf(runtimeA, "goes", 1)["status"].(map[string]any); got["reason"] != "killed" {
		t.Errorf("the exit has the status %v, want reason killed", got)
	}
	// The orchestrator creates it again too, after the registration: that is the same module.
	r.order(runtimeA, wire.ActionCreate, moduleData("stays", "args", args))
	r.order(runtimeA, wire.ActionCreate, moduleData("last"))
	r.a.find(t, true, 1, wire.Create, 2)
	if n := r.a.count(true, wire.Create); n != 5 || r.count(isError) != 0 || r.count(isExit("stays")) != 2 {
		t.Errorf("%d modules created, %d errors, told exited %d times", n, r.count(isError), r.count(isExit("stays")))
	}
	if n := r.m.router.Count(runtimeA, 0); n != 0 {
		t.Errorf("%d channels are open of a module that opened none, want 0", n)
	}
}

// adopting is a runtime whose modules outlive the daemon.
type adopting struct {
	*fake
	lives map[string]bool // by uuid: what there is
	seen  map[string]int
}

func (a *adopting) Adopt(_ context.Context, index int, data wire.ModuleData) (bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.seen[data.UUID()] = index
	return a.lives[data.UUID()], nil
}

// TestRestart: without broker and orchestrator, the next daemon adopts the modules that run, creates those that do not,
// and deletes those whose deletion was ordered.
func TestRestart(t *testing.T) {
	a := &adopting{lives: map[string]bool{}, seen: map[string]int{}}
	r := newRig(t, func(c *Config) {
		a.fake = c.Runtimes[0].(*fake)
		a.info.Durable = true
		c.Runtimes[0] = a
	})
	for _, uuid := range []string{"runs", "gone", "ends", "deleted"} {
		r.order(runtimeA, wire.ActionCreate, moduleData(uuid))
	}
	for index := range 4 {
		r.a.find(t, true, index, wire.Create, 1)
	}
	r.order(runtimeB, wire.ActionCreate, moduleData("b"))
	r.b.find(t, true, 0, wire.Create, 1)
	r.order(runtimeA, wire.ActionDelete, moduleData("deleted"))
	r.a.find(t, true, 3, wire.Delete, 1)
	r.close()
	if n := r.count(func(m mqtt.Message) bool { return isAction(wire.ActionExited)(m) }); n != 0 {
		t.Errorf("%d modules were told exited by a daemon that ends, want 0", n)
	}
	r.set(func(b *bus) { b.away = true })
	a.lives = map[string]bool{"runs": true, "ends": true}
	r.open()
	r.a.find(t, true, 1, wire.Create, 2)
	r.b.find(t, true, 0, wire.Create, 2)
	r.m.hosts[0].wait(t.Context(), func() bool { return r.m.hosts[0].byUUID["deleted"] == nil })
	r.a.tell(t, true, 2, wire.Exited, `{"status": {"code": 0, "reason": "exited"}}`)
	r.m.hosts[0].wait(t.Context(), func() bool { return r.m.hosts[0].byUUID["ends"] == nil })
	r.client().connect()
	if got := r.exitedOf(runtimeA, "ends", 1)["status"].(map[string]any); got["reason"] != "exited" {
		t.Errorf("the exit has the status %v, want reason exited", got)
	}
	if got := r.exitedOf(runtimeA, "deleted", 1)["status"].(map[string]any); got["reason"] != "killed" {
		t.Errorf("the exit has the status %v, want reason killed", got)
	}
	if n := r.a.count(true, wire.Create); n != 5 || a.seen["runs"] != 0 || a.seen["gone"] != 1 {
		t.Errorf("%d created, adopted %v", n, a.seen)
	}
	if n := r.count(isExit("gone")); n != 0 {
		t.Errorf("exits reported of a module that came back: got %d, want none", n)
	}
	r.find(t, topics.Reg(runtimeA), 2, isAction(wire.ActionCreate)) // the exits are told before the subscription
	r.order(runtimeA, wire.ActionCreate, moduleData("new"))
	r.a.find(t, true, 2, wire.Create, 2)
}

// exitWhileAway returns a rig whose module m has exited with code 4 while the broker is away.
func exitWhileAway(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.client().disconnect()
	r.set(func(b *bus) { b.away = true })
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 4, "reason": "exited"}}`)
	return r
}

// TestExitIsToldAgain: an exit that did not reach a broker is reported by the next daemon before it registers.
func TestExitIsToldAgain(t *testing.T) {
	r := exitWhileAway(t)
	r.m.hosts[0].wait(t.Context(), func() bool { return len(r.m.hosts[0].byUUID) == 0 })
	r.client().forget()
	r.close()
	registered := r.count(isRegistration(managerID))
	r.open()
	r.client().connect()
	if got := r.exitedOf(runtimeA, "m", 1)["status"].(map[string]any); got["code"] != 4.0 {
		t.Errorf("the exit has the status %v, want code 4", got)
	}
	r.find(t, topics.Reg(managerID), registered+1, isAction(wire.ActionCreate))
	r.m.exits.waitEmpty(t)
	if n := r.a.count(true, wire.Create); n != 1 {
		t.Errorf("created %d times, want 1", n)
	}
}

// TestExitOfRemovedRuntime: an exit whose runtime is not configured stays in the record, and is reported by a daemon that
// has the runtime again.
func TestExitOfRemovedRuntime(t *testing.T) {
	r := exitWhileAway(t)
	r.m.hosts[0].wait(t.Context(), func() bool { return len(r.m.hosts[0].byUUID) == 0 })
	r.client().forget()
	r.close()
	both := r.conf.Runtimes
	r.conf.Runtimes = both[1:]
	r.set(func(b *bus) { b.away = false })
	r.open()
	r.find(t, topics.Reg(runtimeB), 2, isAction(wire.ActionCreate))
	<-time.After(3 * exitsPoll)
	r.close()
	r.conf.Runtimes = both
	r.open()
	if got := r.exitedOf(runtimeA, "m", 1)["status"].(map[string]any); got["code"] != 4.0 {
		t.Errorf("the exit has the status %v, want code 4", got)
	}
	r.m.exits.waitEmpty(t)
}

// TestCreateWhileTheRuntimeStarts: the runtime gets a module only once it is recorded, in whichever order the two
// happen.
func TestCreateWhileTheRuntimeStarts(t *testing.T) {
	failpoint.Needed(t)
	gate := make(chan struct{})
	r := newRig(t, func(c *Config) { c.Runtimes[0].(*fake).start = func() error { <-gate; return nil } }, func(b *bus) { b.away = true })
	if err := failpoint.Arm("edge.manager.create.recorded", "delay(100ms)"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = failpoint.Arm("edge.manager.create.recorded", "") })
	h := r.m.hosts[0]
	done := make(chan error, 1)
	go func() { done <- h.create("", fromControl, wire.ModuleData{"uuid": []byte(`"m"`)}) }()
	if err := poll(t.Context(), func() bool { return h.at(0) != nil }); err != nil {
		t.Fatal(err)
	}
	close(gate)
	h.wait(t.Context(), func() bool { return h.up })
	if n := r.a.count(true, wire.Create); n != 0 {
		t.Errorf("created before it is recorded")
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	r.a.find(t, true, 0, wire.Create, 1)
}
