package manager

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/node/store"
)

// own is a runtime with replaceable create, delete and clean-up functions.
type own struct {
	*fake
	create func(index int, data wire.ModuleData) error
	remove func(index int, uuid string) error

	mu      sync.Mutex
	cleaned []string
}

func (o *own) Create(_ context.Context, index int, data wire.ModuleData) error {
	return o.create(index, data)
}

func (o *own) Delete(_ context.Context, index int, uuid string) error {
	return o.remove(index, uuid)
}

func (o *own) Cleanup(_ context.Context, index int, uuid string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.cleaned = append(o.cleaned, fmt.Sprintf("%d %s", index, uuid))
	if len(o.cleaned) == 1 {
		return fmt.Errorf("not now: %w", errdefs.ErrUnavailable)
	}
	return nil
}

func ownRig(t *testing.T, change ...func(*Config)) (*rig, *own) {
	o := &own{}
	r := newRig(t, func(c *Config) {
		for _, f := range change {
			f(c)
		}
		o.fake = c.Runtimes[0].(*fake)
		o.create = func(int, wire.ModuleData) error { return nil }
		o.remove = func(int, string) error { return nil }
		c.Runtimes[0] = o
	})
	return r, o
}

// TestCreateFails: after a temporary failure the create is retried; after a permanent one the module is reported as
// exited and its index is free.
func TestCreateFails(t *testing.T) {
	r, o := ownRig(t)
	tries := make(chan int, 16)
	o.create = func(index int, data wire.ModuleData) error {
		tries <- index
		switch {
		case data.UUID() == "bad":
			return fmt.Errorf("no such program: %w", errdefs.ErrNotFound)
		case len(tries) < 3:
			return fmt.Errorf("not now: %w", errdefs.ErrUnavailable)
		}
		return nil
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("later"))
	r.states(runtimeA, "", map[string]string{"later": "running"})
	if n := len(tries); n != 3 {
		t.Errorf("tried %d times, want 3", n)
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("bad"))
	if got := r.exitedOf(runtimeA, "bad", 1)["status"].(map[string]any); got["code"] != 125.0 ||
		!strings.Contains(got["message"].(string), "no such program") {
		t.Errorf("the exit has the status %v, want code 125", got)
	}
	if got := r.errorWith(1); !strings.Contains(got, "no such program") {
		t.Errorf("answered %q, want %q in it", got, "no such program")
	}
	r.states(runtimeA, "", map[string]string{"later": "running"})
	r.order(runtimeA, wire.ActionCreate, moduleData("bad"))
	r.exitedOf(runtimeA, "bad", 2)
	for want := range []int{0, 0, 0, 1, 1} {
		if got := <-tries; got != []int{0, 0, 0, 1, 1}[want] {
			t.Errorf("try %d was at index %d", want, got)
		}
	}
}

// TestEarlyExit: a module can exit before the call that creates it has returned; its index is not used before that.
func TestEarlyExit(t *testing.T) {
	r, o := ownRig(t)
	called, gate := make(chan int, 2), make(chan struct{})
	o.create = func(index int, data wire.ModuleData) error {
		called <- index
		if data.UUID() == "short" {
			<-gate
		}
		return nil
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("short"))
	<-called
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 0, "reason": "exited"}}`)
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 9, "reason": "exited"}}`) // a second end is none
	r.order(runtimeA, wire.ActionCreate, moduleData("next"))
	if index := <-called; index != 1 {
		t.Errorf("index %d is used while the module there is being created", index)
	}
	close(gate)
	if got := r.exitedOf(runtimeA, "short", 1)["status"].(map[string]any); got["code"] != 0.0 {
		t.Errorf("the exit has the status %v, want code 0", got)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.cleaned) != 2 || o.cleaned[1] != "0 short" || r.count(isExit("short")) != 1 {
		t.Errorf("cleaned up %q, told %d times", o.cleaned, r.count(isExit("short")))
	}
}

// TestDeletes: the deletion of a module that the runtime does not know is reported as an exit immediately; a failed
// deletion is answered and can be repeated; one that arrives while the module is being created takes effect afterwards.
func TestDeletes(t *testing.T) {
	r, o := ownRig(t)
	var fail error
	removed := make(chan int, 4)
	o.remove = func(index int, _ string) error {
		removed <- index
		return fail
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.states(runtimeA, "", map[string]string{"m": "running"})
	fail = fmt.Errorf("it does not listen: %w", errdefs.ErrInternal)
	r.order(runtimeA, wire.ActionDelete, moduleData("m"))
	<-removed
	if got := r.errorWith(1); !strings.Contains(got, "it does not listen") {
		t.Errorf("answered %q, want %q in it", got, "it does not listen")
	}
	fail = fmt.Errorf("no such module: %w", errdefs.ErrNotFound)
	r.order(runtimeA, wire.ActionDelete, moduleData("m"))
	<-removed
	r.exitedOf(runtimeA, "m", 1)
	gate, called := make(chan struct{}), make(chan struct{})
	o.create = func(int, wire.ModuleData) error { close(called); <-gate; return nil }
	fail = nil
	r.order(runtimeA, wire.ActionCreate, moduleData("slow"))
	<-called
	r.order(runtimeA, wire.ActionDelete, moduleData("slow"))
	r.states(runtimeA, "", map[string]string{"slow": "deleting"})
	close(gate)
	<-removed
}

// TestRecordFails: an order that cannot be recorded is refused, and running modules keep running.
func TestRecordFails(t *testing.T) {
	r := newRig(t, nil)
	r.modules(r.a, 1)
	r.a.open(t, 0, 0, channel.Write, "goes/on")
	if err := r.m.store.Close(); err != nil {
		t.Fatal(err)
	}
	r.order(runtimeA, wire.ActionCreate, moduleData("no"))
	if got := r.errorWith(1); !strings.Contains(got, "record") {
		t.Errorf("answered %q, want %q in it", got, "record")
	}
	r.exitedOf(runtimeA, "no", 1)
	r.order(runtimeA, wire.ActionDelete, moduleData("a0"))
	r.errorWith(2)
	r.a.tell(t, false, 0, 0, "still here")
	r.find(t, "goes/on", 1, nil)
	r.a.tell(t, true, 0, wire.Exited, `{}`)
	r.exitedOf(runtimeA, "a0", 1)
}

// TestPoisonedRecord: entries that are unreadable, or belong to a removed runtime, do not prevent the start.
func TestPoisonedRecord(t *testing.T) {
	r := newRig(t, nil)
	r.modules(r.a, 1)
	r.close()
	s, err := openStore(r.conf.Root)
	if err != nil {
		t.Fatal(err)
	}
	good := fmt.Sprintf(`{"runtime": %q, "index": %%d, "state": "created", "data": "e30="}`, runtimeA)
	for key, value := range map[string]string{"junk": "\xff", "no-data": fmt.Sprintf(`{"runtime": %q}`, runtimeA),
		"taken": fmt.Sprintf(good, 0),
		"far":   fmt.Sprintf(good, 500), "other": `{"runtime": "gone", "data": "e30="}`} {
		if err := s.Put(kindModule, key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	if err := poison(s, kindExit, kindDesired); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	r.open()
	r.a.find(t, true, 0, wire.Create, 2)
	r.find(t, topics.Reg(runtimeA), 2, isAction(wire.ActionCreate)) // it has subscribed
	r.order(runtimeA, wire.ActionCreate, moduleData("new"))
	r.a.find(t, true, 1, wire.Create, 1)
}

func poison(s *store.Store, kinds ...string) error {
	for _, kind := range kinds {
		if err := s.Put(kind, runtimeA, []byte("{")); err != nil {
			return err
		}
	}
	return nil
}

// TestConfigs: invalid configurations are refused before anything is opened.
func TestConfigs(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"no uuid":       func(c *Config) { c.UUID = "" },
		"a wild realm":  func(c *Config) { c.Topics.Realm = "a/#" },
		"the same uuid": func(c *Config) { c.Runtimes[1].(*fake).info.UUID = runtimeA },
		"too many":      func(c *Config) { c.Runtimes[1].(*fake).info.MaxModules = 129 },
		"a bad uuid":    func(c *Config) { c.Runtimes[1].(*fake).info.UUID = "a/b" },
	} {
		r := &rig{bus: newBus(), a: newFake("a", runtimeA), b: newFake("b", runtimeB)}
		c := Config{Root: t.TempDir(), UUID: managerID, Topics: topics, Dial: r.dial, Runtimes: asRuntimes(r.a, r.b)}
		change(&c)
		if m, err := Open(c); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: Open returned %v, %v, want InvalidArgument", name, m, err)
		}
	}
}
